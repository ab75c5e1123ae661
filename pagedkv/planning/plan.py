"""A model's plan for a device: every figure that `pagedkv plan` shows, gathered once."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pagedkv import __version__
from pagedkv.api import PoolCost
from pagedkv.api.errors import OutOfDeviceMemory
from pagedkv.config import EngineConfig
from pagedkv.engine.memory import MemoryPlan
from pagedkv.engine.quantization import describe
from pagedkv.engine.setup import Agreed, agree
from pagedkv.planning.advice import Advice, advise
from pagedkv.planning.cost import token_bytes
from pagedkv.planning.fit import Fit
from pagedkv.planning.model import NOT_BUILT, open_part, without_weights
from pagedkv.planning.rates import rates_of
from pagedkv.planning.speed import Interval, Rates, Speed, work_of
from pagedkv.planning.target import check_memory, open_target

_log = logging.getLogger("pagedkv.planning")

LENGTHS = (512, 2048, 8192, 32768)
"""For which the number of sequences is told, beside max_model_len."""
BATCHES = (1, 8, 32)
CONTEXT = 1024
"""Tokens behind each sequence for which the speed of decode is told, and of a prompt for that of prefill."""

FITS, SHARED, SHORT, NOTHING = "fits", "fits in turns", "too long", "does not fit"
"""All sequences at full length; one at least; none, shorter ones only; not even a block of the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Tokens a second; `decode` holds (sequences, interval), for sequences of `context` tokens."""

    rates: Rates
    context: int
    decode: tuple[tuple[int, Interval], ...]
    prefill: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What was found. `memory`: the engine's own plan for the settings, None where it would not start: `refusal`.

    `sequences` holds (length, how many fit at once); `longest` is for one sequence alone; `needed` are bytes for all
    of max_num_seqs at max_model_len, `ceiling` those that may be taken, both with weights and workspace.
    """

    config: EngineConfig
    fit: Fit
    ranks: int
    cost: PoolCost
    memory: MemoryPlan | None
    refusal: str
    needed: int
    ceiling: int | None
    longest: int
    sequences: tuple[tuple[int, int], ...]
    advice: tuple[Advice, ...]
    prediction: Prediction | None

    @property
    def verdict(self) -> str:
        """One of `FITS`, `SHARED`, `SHORT`, `NOTHING`."""
        request = self.fit.agreed.request
        if self.memory is None:
            return NOTHING
        if self.memory.num_blocks >= request.useful_blocks:
            return FITS
        one = -(-request.max_model_len // request.block_size)
        return SHARED if self.memory.num_blocks > one else SHORT

    @property
    def records_steps(self) -> bool:
        """Whether the engine would record decode steps, as far as can be told before it has loaded the model."""
        can, config = self.fit.target.backend.capabilities(), self.config
        asked = config.enforce_eager is False or config.max_seq_len_to_capture is not None
        return (
            can.graph != "none"
            and "graph" in can.extensions
            and not config.enforce_eager
            and (asked or can.graph_default)
        )

    @property
    def least(self) -> int:
        """Bytes without which the engine does not start: weights, workspace, the null block and another one."""
        return self.fit.agreed.request.needed + self.cost.fixed + 2 * self.cost.per_block

    @property
    def per_token(self) -> int:
        """Bytes of one token's keys and values, without a backend's padding."""
        group = self.fit.agreed.spec.groups[0]
        return token_bytes(group.layers, group.kv_dtype)


@contextmanager
def planned(
    config: EngineConfig, *, device: str | None = None, memory: int | None = None, ranks: int = 1, speed: bool = True
) -> Iterator[Plan]:
    """The plan for the settings; `memory` in bytes stands for the device's. Its backend is open within the block.

    Raises what choosing a backend, opening the model and negotiating raise, and `ConfigError` where no memory is known.
    """
    target = open_target(config, device, memory)
    try:
        if not target.here:
            # This machine's host memory says nothing of that one's: none, unless it is asked for.
            config = config if _asks_for_swap(config) else dataclasses.replace(config, swap_blocks=0)
        check_memory(target)
        checkpoint = open_part(without_weights(config), ranks)
        try:
            agreed = agree(config, target.selected, target.backend, checkpoint)
            _tell(agreed)
            yield _plan(config, Fit(target=target, checkpoint=checkpoint, agreed=agreed), ranks, speed)
        finally:
            checkpoint.close()
    finally:
        target.close()


def _tell(agreed: Agreed) -> None:
    """What was chosen, as the engine tells it."""
    for line in (*agreed.choice.notes, describe(agreed.weights, agreed.choice.dtype)):
        if line:
            _log.info("%s", line)


def _asks_for_swap(config: EngineConfig) -> bool:
    return config.swap_space is not None or config.swap_blocks is not None


def _plan(config: EngineConfig, fit: Fit, ranks: int, speed: bool) -> Plan:
    memory, refusal = None, ""
    try:
        memory = fit.settings()
    except OutOfDeviceMemory as error:
        refusal = str(error).splitlines()[0]
    longest = fit.longest(1)
    plan = Plan(
        config=config,
        fit=fit,
        ranks=ranks,
        cost=fit.cost(fit.agreed.spec),
        memory=memory,
        refusal=refusal,
        needed=fit.needs(fit.limits.rows, fit.limits.context),
        ceiling=fit.ceiling(),
        longest=longest,
        sequences=tuple((length, fit.most(length)) for length in _lengths(fit)),
        advice=(),
        prediction=_predict(fit, longest) if speed else None,
    )
    return plan if plan.verdict == FITS else dataclasses.replace(plan, advice=advise(fit, config))


def _lengths(fit: Fit) -> list[int]:
    longest = fit.limits.context
    return [*(length for length in LENGTHS if length < longest), longest]


def _predict(fit: Fit, longest: int) -> Prediction | None:
    """None where nothing fits, or the device's limits are unknown."""
    rates = rates_of(fit.target, fit.agreed.choice.dtype) if longest else None
    if rates is None:
        return None
    speed, context = speed_of(fit, rates), min(CONTEXT, longest)
    batches = [batch for batch in BATCHES if batch == 1 or fit.holds(batch, context)]
    if fit.checkpoint.config.pooling is not None:
        batches = []  # vectors are made of whole texts
    return Prediction(
        rates=rates,
        context=context,
        decode=tuple((batch, speed.decode(batch, context)) for batch in batches),
        prefill=speed.prefill(context),
    )


def speed_of(fit: Fit, rates: Rates) -> Speed:
    """Predictions for this model on a device with these limits."""
    return Speed(work=work_of(fit.checkpoint, fit.agreed), rates=rates)


# -- as JSON values ----------------------------------------------------------------------------------------------------


def as_record(plan: Plan) -> dict[str, Any]:
    """The plan as JSON values: bytes, tokens, tokens a second. Names stay; new ones may come."""
    return {
        "pagedkv": __version__,
        "model": plan.config.model,
        "verdict": plan.verdict,
        "refusal": plan.refusal or None,
        "device": _device_record(plan),
        "settings": _settings_record(plan),
        "bytes": _bytes_record(plan),
        "blocks": None if plan.memory is None else plan.memory.num_blocks,
        "sized_by": None if plan.memory is None else plan.memory.rule,
        "longest": plan.longest,
        "sequences": [{"length": length, "fit": count} for length, count in plan.sequences],
        "advice": [dataclasses.asdict(advice) for advice in plan.advice],
        "speed": None if plan.prediction is None else _speed_record(plan.prediction),
        "notes": [*plan.fit.agreed.choice.notes, *_notes(plan)],
    }


def _notes(plan: Plan) -> Iterator[str]:
    device = plan.fit.target.device
    if device is not None and device.note:
        yield device.note
    if plan.ranks > 1:
        yield NOT_BUILT


def _device_record(plan: Plan) -> dict[str, Any]:
    target = plan.fit.target
    memory, device = target.memory(), target.device
    return {
        "name": None if device is None else device.name,
        "title": target.title,
        "here": target.here,
        "backend": target.selected.name,
        "total": memory.total,
        "free": memory.free,
        "unified": memory.unified,
        "source": device.source if device is not None else "this machine" if target.real else "--memory",
    }


def _settings_record(plan: Plan) -> dict[str, Any]:
    agreed = plan.fit.agreed
    return {
        "dtype": agreed.choice.dtype,
        "kv_cache_dtype": agreed.choice.kv_dtype,
        "block_size": agreed.choice.block_size,
        "max_model_len": agreed.spec.limits.context,
        "max_num_seqs": agreed.spec.limits.rows,
        "max_num_batched_tokens": agreed.spec.limits.tokens,
        "gpu_memory_utilization": plan.config.gpu_memory_utilization,
        "tensor_parallel_size": plan.ranks,
    }


def _bytes_record(plan: Plan) -> dict[str, Any]:
    request, memory = plan.fit.agreed.request, plan.memory
    return {
        "weights": request.weights,
        "weights_note": request.weights_note,
        "workspace": request.workspace,
        "per_token": plan.per_token,
        "per_block": plan.cost.per_block,
        "fixed": plan.cost.fixed,
        "cost_known": plan.fit.target.cost,
        "cache": None if memory is None else memory.cache,
        "total": None if memory is None else memory.total,
        "least": plan.least,
        "needed": plan.needed,
        "ceiling": plan.ceiling,
    }


def _speed_record(prediction: Prediction) -> dict[str, Any]:
    rates = prediction.rates
    return {
        "bandwidth": rates.bandwidth,
        "peak": rates.peak,
        "source": rates.source,
        "assumed": dict(rates.parts),
        "context": prediction.context,
        "decode": [{"sequences": batch, **interval.figures()} for batch, interval in prediction.decode],
        "prefill": prediction.prefill.figures(),
    }
