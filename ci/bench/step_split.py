"""Where a decode step's time goes: products, attention, the other ops, sampling, and Python.

The engine is the real one. Clocks stand around the backend's calls and ops and, inside of them, around the functions of
its compiled library; their own cost is measured and subtracted. What no clock sees is the step's Python: scheduling,
the model's loop, views of tensors, outputs. `glue` is the part of a clocked call that is not compiled code: making the
result's tensor, passing addresses.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from unittest.mock import patch

from clocks import NATIVE, Clocks, Cost, Total, clock_cost, is_compiled
from limits import seconds_of

from pagedkv import plugins
from pagedkv.api import AttentionBackend, OpSpec
from pagedkv.cli.standard_work import Work, bench_settings
from pagedkv.config import EngineConfig
from pagedkv.engine.engine import LLMEngine
from pagedkv.engine.runner import Runner
from pagedkv.engine.setup import build
from pagedkv.sampling.params import SamplingParams
from pagedkv.sampling.sampler import Sampler
from pagedkv_cpu.native import Kernels

PRODUCTS, ATTENTION, OTHERS, PLAN, SAMPLING = "products", "attention", "norms, turns, gates, rows", "plan", "sampling"
PYTHON = "Python of engine and model"
_WARM_UP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step: its seconds, and what each clock saw of it."""

    seconds: float
    totals: Mapping[str, Total]


def step_splits(model: str, batches: Sequence[int], work: Work, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each batch size, seconds of a step by part, medians over the decode steps."""
    cost, rows = clock_cost(), []
    for batch in batches:
        plain = statistics.median(step.seconds for step in decode_steps(model, batch, work, settings))
        clocks = Clocks()
        with clocked(clocks):
            steps = list(decode_steps(model, batch, work, settings, clocks))
        rows.append({"batch_size": batch, "seconds": plain, **split(steps, cost)})
    return rows


class _Watch:
    """Stands before the runner and keeps the last step's batch."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.decoding = 0
        """Requests of the last step, where all of them decoded; else 0."""

    def run(self, step: Any) -> Any:
        batch = step.batch
        self.decoding = batch.num_decode if batch.num_decode == batch.num_tokens else 0
        return self._runner.run(step)

    def close(self) -> None:
        self._runner.close()


def decode_steps(
    model: str, batch: int, work: Work, settings: Mapping[str, Any], clocks: Clocks | None = None
) -> Iterator[Step]:
    """Each step of an engine in which all requests decode, but the first few. `clocks`: those that stand in it."""
    parts = build(EngineConfig.of(model=model, **bench_settings(work, batch, settings)))
    watch = _Watch(parts.runner)
    engine = LLMEngine(dataclasses.replace(parts, runner=cast(Runner, watch)))
    try:
        add_requests(engine, batch, work)
        decoded = 0
        while engine.has_unfinished_requests():
            step = _timed(engine, clocks or Clocks())
            decoded += watch.decoding == batch
            if watch.decoding == batch and decoded > _WARM_UP:
                yield step
    finally:
        engine.close()


def add_requests(engine: LLMEngine, batch: int, work: Work) -> None:
    """The requests of the standard work."""
    params = SamplingParams(temperature=0.0, max_tokens=work.output_len, ignore_eos=True, detokenize=False)
    for prompt in work.prompts(engine.parts.vocab_size, batch, 1):
        engine.add_request({"prompt_token_ids": prompt}, params)


def _timed(engine: LLMEngine, clocks: Clocks) -> Step:
    before = clocks.snapshot()
    seconds = seconds_of(engine.step)
    after = clocks.snapshot()
    return Step(seconds=seconds, totals={name: after[name] - total for name, total in before.items()})


@contextmanager
def clocked(clocks: Clocks) -> Iterator[None]:
    """Everything that is created meanwhile has clocks around it."""
    create, open_kernels, draw = plugins.create, Kernels.__init__, Sampler.__call__

    def created(*args: Any, **named: Any) -> AttentionBackend:
        return with_clocks(create(*args, **named), clocks)

    def opened(kernels: Kernels, *args: Any, **named: Any) -> None:
        open_kernels(kernels, *args, **named)
        for name, value in list(vars(kernels).items()):
            if is_compiled(value):
                setattr(kernels, name, clocks.around_native(value))

    with (
        patch.object(plugins, "create", created),
        patch.object(Kernels, "__init__", opened),
        patch.object(Sampler, "__call__", clocks.around(SAMPLING, draw)),
    ):
        yield


def with_clocks(backend: AttentionBackend, clocks: Clocks) -> AttentionBackend:
    """The same instance, its calls of a step and its ops clocked."""
    op = backend.op

    def clocked_op(name: str, spec: OpSpec) -> Any:
        found = op(name, spec)
        return None if found is None else clocks.around(PRODUCTS if name == "linear" else OTHERS, found)

    changed: dict[str, Any] = {
        "op": clocked_op,
        "attend": clocks.around(ATTENTION, backend.attend),
        "plan": clocks.around(PLAN, backend.plan),
    }
    for name, call in changed.items():
        setattr(backend, name, call)
    return backend


def split(steps: Sequence[Step], cost: Cost) -> dict[str, Any]:
    """Medians over steps: each part's calls, seconds, and glue; and the share of Python, glue included."""
    names = [name for name in steps[0].totals if name != NATIVE]
    parts = {name: _part([step.totals[name] for step in steps], cost) for name in names}
    whole = statistics.median(step.seconds - cost.added(dict(step.totals)) for step in steps)
    python = whole - sum(part["seconds"] for part in parts.values())
    glue = sum(part["glue"] for name, part in parts.items() if name != SAMPLING)
    rest = {PYTHON: {"calls": 0, "seconds": python, "glue": python}}
    return {"clocked_seconds": whole, "steps": len(steps), "parts": parts | rest, "python": (python + glue) / whole}


def _part(totals: Sequence[Total], cost: Cost) -> dict[str, Any]:
    corrected = [cost.corrected(total) for total in totals]
    return {
        "calls": round(statistics.median(total.calls for total in totals)),
        "seconds": statistics.median(seconds for seconds, _ in corrected),
        "glue": statistics.median(seconds - native for seconds, native in corrected),
    }
