"""What host memory behind the cache costs and saves, measured on one engine at a time.

    python ci/bench/swap.py demo                 # all parts, some minutes
    python ci/bench/swap.py demo --only copies,break_even --json swap.json

    copies       blocks copied to the host and back, beside a plain copy of an array
    steps        a decode step while blocks are on their way, and while none are
    break_even   tokens from which on swapping is cheaper than computing again: as priced, and as measured
    crowded      work twice the size of the cache: swapped, computed again, and with a cache that is large enough
    host_hit     a prompt whose beginning lies in host memory, beside computing it

On the CPU backend host memory is the cache's own memory: its figures are those of copies within one RAM.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np

from pagedkv import SamplingParams
from pagedkv.cli.machine import machine
from pagedkv.cli.tables import print_table
from pagedkv.config import EngineConfig
from pagedkv.engine.engine import LLMEngine
from pagedkv.engine.setup import build

ARRAY_BYTES = 256 << 20
LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Row = dict[str, Any]


@contextmanager
def engine(model: str, **settings: Any) -> Iterator[LLMEngine]:
    """An engine with host memory, one request's tokens being 1,024 at most."""
    named = {"swap_space": "1GiB", "max_num_seqs": 32, "max_model_len": 1280} | settings
    made = LLMEngine(build(EngineConfig.of(model=model, **named)))
    try:
        yield made
    finally:
        made.close()


def prompts(made: LLMEngine, count: int, length: int, seed: int) -> list[list[int]]:
    """Random prompts."""
    random = np.random.default_rng(seed)
    return random.integers(0, made.parts.vocab_size, (count, length)).tolist()


def run(made: LLMEngine, asked: Sequence[list[int]], tokens: int) -> float:
    """Answer `asked` with so many tokens each; seconds."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    for prompt in asked:
        made.add_request(prompt, params)
    while made.has_unfinished_requests():
        made.step()
    return time.perf_counter() - began


def copies(model: str) -> list[Row]:
    """GB/s of blocks in one direction, and of a plain copy of an array, each byte counted once."""
    array = np.ones(ARRAY_BYTES, np.uint8)
    other = np.zeros_like(array)
    limit = ARRAY_BYTES / min(_timed(lambda: np.copyto(other, array)) for _ in range(5))
    with engine(model, num_blocks=513) as made:
        swap = made.parts.swap
        if swap is None:
            raise click.UsageError("this backend has no host memory beside its own")
        size = swap.plan.cost.per_block
        host = made.parts.runner.backend.alloc_pool(
            dataclasses.replace(made.parts.runner.pool.spec, placement="host", num_blocks=257)
        )
        rows = []
        for count in (1, 8, 32, 256):
            seconds = swap.round_trip(host, count)
            rate = count * size / seconds
            rows.append({"blocks": count, "GB/s": rate / 1e9, "of a plain copy": rate / limit, "ms": 1e3 * seconds})
        host.close()
    return rows


def _timed(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def steps(model: str) -> list[Row]:
    """Milliseconds of a decode step of 8 requests, with blocks moving and without."""
    with engine(model, num_blocks=1500) as made:
        run(made, prompts(made, 32, 512, 1), 1)  # leaves a thousand cached blocks behind
        params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True, detokenize=False)
        for prompt in prompts(made, 8, 64, 2):
            made.add_request(prompt, params)
        found: dict[bool, list[float]] = {True: [], False: []}
        scheduler = made.scheduler
        for number in range(100):
            moves = number % 4 == 3
            if moves:
                scheduler.tiers.save_oldest(1 << 20)
            seconds = _timed(made.step)
            if number >= 8:
                found[moves].append(1e3 * seconds)
        saved = scheduler.tiers.num_saved
    return [
        {"blocks moving": name, "steps": len(times), "ms (median)": statistics.median(times), "worst": max(times)}
        for name, times in (("none", found[False]), (f"{saved} in all, up to 64 a step", found[True]))
    ]


class SlowLink:
    """A backend whose copies between pools take as long as over a link of `bandwidth` bytes a second."""

    bandwidth, latency = 300e6, 0.02

    def __init__(self, backend: Any, block_bytes: int) -> None:
        self._backend, self._block_bytes = backend, block_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def copy_blocks(self, source: Any, target: Any, pairs: Any, **names: Any) -> Any:
        """The same copy, begun late."""
        time.sleep(self.latency + len(pairs) * self._block_bytes / self.bandwidth)
        return self._backend.copy_blocks(source, target, pairs, **names)


def break_even(model: str) -> list[Row]:
    """Milliseconds to bring back n tokens, and from where on copying is cheaper: as priced, and as measured.

    The slow link is simulated: 300 MB/s, and 20 ms before the first byte.
    """
    with engine(model, num_blocks=257, enable_prefix_caching=False) as made:
        swap, rows, size = made.parts.swap, [], made.scheduler.config.block_size
        if swap is None:
            raise click.UsageError("this backend has no host memory beside its own")
        host = made.parts.runner.backend.alloc_pool(
            dataclasses.replace(made.parts.runner.pool.spec, placement="host", num_blocks=65)
        )
        run(made, prompts(made, 1, 512, 0), 1)
        computing = {}
        for length in LENGTHS:
            asked = [prompts(made, 1, length, seed) for seed in range(5)]
            computing[length] = statistics.median(run(made, each, 1) for each in asked)
        for link, backend in (
            ("the backend's", made.parts.runner.backend),
            ("slow, simulated", SlowLink(made.parts.runner.backend, swap.plan.cost.per_block)),
        ):
            swap._backend = backend
            swap.measure()
            copying = {length: 2 * swap.round_trip(host, -(-length // size)) for length in LENGTHS}
            rows.append(
                {"link": link}
                | {str(length): f"{1e3 * computing[length]:.1f} / {1e3 * copying[length]:.1f}" for length in LENGTHS}
                | {"priced": made.scheduler.price.break_even(size), "measured": _crossing(computing, copying)}
            )
        host.close()
    return rows


def _crossing(computing: dict[int, float], copying: dict[int, float]) -> str:
    """From how many tokens on copying is cheaper, between two lengths in a straight line."""
    before = None
    for length in LENGTHS:
        gain = computing[length] - copying[length]
        if gain > 0:
            if before is None:
                return f"below {length}"
            shorter, loss = before
            return f"{shorter + (length - shorter) * loss / (loss + gain):.1f}"
        before = length, -gain
    return f"above {LENGTHS[-1]}"


def crowded(model: str) -> list[Row]:
    """Output tokens a second of 16 requests of 128 + 128 tokens that need twice the blocks there are."""
    rows = []
    need = 16 * (256 // 16)
    for name, settings in (
        ("swap", {"num_blocks": need // 2 + 1, "preemption_mode": "swap"}),
        ("recompute", {"num_blocks": need // 2 + 1, "swap_space": 0}),
        ("a cache large enough", {"num_blocks": 2 * need, "swap_space": 0}),
    ):
        with engine(model, enable_prefix_caching=False, block_size=16, **settings) as made:
            run(made, prompts(made, 4, 64, 9), 4)
            seconds = run(made, prompts(made, 16, 128, 3), 128)
            now = made.metrics()
        rows.append(
            {
                "cache": name,
                "tokens/s": 16 * 128 / seconds,
                "preemptions": now.preemptions,
                "swaps": now.swaps,
                "computed again": now.recomputed_tokens,
                "blocks out": now.blocks_saved,
            }
        )
    return rows


def host_hit(model: str) -> list[Row]:
    """Milliseconds to the first token of a prompt of 1,009 tokens: from host memory, from the device, computed."""
    with engine(model, num_blocks=160) as made:
        first, others = prompts(made, 1, 1009, 4), prompts(made, 3, 1009, 5)
        rows = [{"1,008 tokens": "computed", "ms": 1e3 * run(made, first, 1)}]
        made.settle()
        rows.append({"1,008 tokens": "on the device", "ms": 1e3 * run(made, first, 1)})
        for other in others:
            run(made, [other], 1)
            made.settle()
        before = made.metrics().blocks_fetched
        rows.append({"1,008 tokens": "in host memory", "ms": 1e3 * run(made, first, 1)})
        rows[-1]["blocks fetched"] = made.metrics().blocks_fetched - before
    return rows


PARTS = {part.__name__: part for part in (copies, steps, break_even, crowded, host_hit)}


@click.command()
@click.argument("model", default="demo")
@click.option("--only", help="Parts, separated by commas.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures to a file.")
def main(model: str, only: str | None, path: Path | None) -> None:
    """Measure host memory behind the cache of MODEL."""
    chosen = only.split(",") if only else list(PARTS)
    if unknown := [name for name in chosen if name not in PARTS]:
        raise click.BadParameter(f"{', '.join(unknown)}: known parts are {', '.join(PARTS)}")
    results = {}
    for name in chosen:
        results[name] = PARTS[name](model)
        click.echo(f"\n{(PARTS[name].__doc__ or name).strip()}")
        columns = list(dict.fromkeys(key for row in results[name] for key in row))
        print_table(columns, [[_shown(row.get(key, "")) for key in columns] for row in results[name]])
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), "model": model, **results}, indent=1), encoding="utf-8")


def _shown(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
