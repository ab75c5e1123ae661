"""The five host costs of the core: what one step, one eviction, one hit, one hash and one import take without a device.

Each measure is a list of seconds, taken in one process (the import in fresh ones); its median stands beside the target.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pagedkv.core.block_pool import BlockPool
from pagedkv.core.prefix_index import PrefixIndex
from pagedkv.core.scheduler import Scheduler, SchedulerConfig

SEQUENCES, CONTEXT, STEPS = 256, 128, 200
LEAVES, EVICTIONS = 50_000, 1_000
POOL, PROMPT_BLOCKS, HITS = 131_072, 64, 200
HASHED, BLOCK, HASHES = 50_000, 16, 20
IMPORTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One measure. `target` in seconds; None: shown for orientation only."""

    name: str
    seconds: list[float]
    target: float | None


def host_costs() -> Iterator[Cost]:
    """Every measure, one after the other."""
    yield Cost(name=f"bookkeeping of a decode step, {SEQUENCES} sequences", seconds=decode_steps(), target=100e-6)
    yield Cost(name=f"evict one block, {LEAVES:,} cached leaves", seconds=evictions(LEAVES), target=5e-6)
    yield Cost(name=f"the same, {LEAVES // 10:,} leaves", seconds=evictions(LEAVES // 10), target=None)
    find, admit = hits()
    yield Cost(name=f"find and take {PROMPT_BLOCKS} cached blocks of {POOL:,}", seconds=find, target=50e-6)
    yield Cost(name="schedule() of that prompt, hashing it included", seconds=admit, target=None)
    yield Cost(name=f"hash {HASHED:,} tokens, block {BLOCK}", seconds=hashes(), target=2.3e-3)
    yield Cost(name="import pagedkv.core.scheduler", seconds=imports(), target=0.2)


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def decode_steps() -> list[float]:
    """schedule() and update() while all sequences decode; blocks that fill up on the way included."""
    length = CONTEXT + STEPS + 16
    config = SchedulerConfig(
        num_blocks=2 * SEQUENCES * -(-length // BLOCK) + 1,
        block_size=BLOCK,
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=SEQUENCES * CONTEXT,
        max_model_len=length,
    )
    scheduler = Scheduler(config)
    generator = np.random.default_rng(0)
    for _ in range(SEQUENCES):
        scheduler.add(generator.integers(0, 50_000, CONTEXT).astype(np.int32), max_tokens=STEPS + 8)
    one_step(scheduler)
    seconds = [timed(lambda: one_step(scheduler)) for _ in range(STEPS)]
    if len(scheduler.running) != SEQUENCES:
        raise RuntimeError(f"{len(scheduler.running)} of {SEQUENCES} sequences ran: this is no measure of a full step")
    return seconds


def one_step(scheduler: Scheduler) -> None:
    """A step without a device: every sampled id is 7."""
    step = scheduler.schedule()
    if step is not None:
        scheduler.update(step, np.full(len(step.sample), 7, np.int32))


def evictions(leaves: int) -> list[float]:
    """Take a block from a pool in which every block is cached and unreferenced."""
    index = PrefixIndex()
    pool = BlockPool(leaves + 1, index)
    blocks = pool.allocate(leaves, "leaves")
    for block in blocks:
        index.insert(block.to_bytes(32, "little"), block)
    pool.release(blocks)
    return [timed(lambda: pool.allocate(1, "new")) for _ in range(min(EVICTIONS, leaves))]


def hits() -> tuple[list[float], list[float]]:
    """(find and acquire, a whole schedule()) for a prompt whose blocks lie cached among all others."""
    tokens = PROMPT_BLOCKS * BLOCK
    config = SchedulerConfig(
        num_blocks=POOL, block_size=BLOCK, max_num_seqs=4, max_num_batched_tokens=2 * tokens, max_model_len=2 * tokens
    )
    scheduler = Scheduler(config)
    prompt = np.random.default_rng(1).integers(0, 50_000, tokens + 1).astype(np.int32)
    fill(scheduler, POOL // 2)
    admit(scheduler, prompt)
    fill(scheduler, POOL // 4)
    hashed: list[bytes] = []
    scheduler.index.extend(hashed, scheduler.index.root(), prompt[:tokens].tobytes(), BLOCK * 4)
    find = [timed_hit(scheduler, hashed) for _ in range(HITS)]
    return find, [admit(scheduler, prompt) for _ in range(HITS)]


def fill(scheduler: Scheduler, blocks: int) -> None:
    """Cached, unreferenced blocks of other prompts."""
    taken = scheduler.pool.allocate(blocks, "filler")
    for block in taken:
        scheduler.index.insert(block.to_bytes(32, "big"), block)
    scheduler.pool.release(taken)


def timed_hit(scheduler: Scheduler, hashed: list[bytes]) -> float:
    """Find and take the prompt's blocks, then give them back, which is not measured."""
    began = time.perf_counter()
    found = scheduler.index.find(hashed, PROMPT_BLOCKS)
    scheduler.pool.acquire(found, "hit")
    seconds = time.perf_counter() - began
    if len(found) != PROMPT_BLOCKS:
        raise RuntimeError(f"{len(found)} of {PROMPT_BLOCKS} blocks were found: this is no measure of a hit")
    scheduler.pool.release(reversed(found))
    return seconds


def admit(scheduler: Scheduler, prompt: np.ndarray) -> float:
    """Seconds of the schedule() that admits the prompt; it is finished afterwards."""
    request = scheduler.add(prompt, max_tokens=1)
    began = time.perf_counter()
    step = scheduler.schedule()
    seconds = time.perf_counter() - began
    if step is None or request not in step.admitted:
        raise RuntimeError("the prompt was not admitted: this is no measure of a hit")
    scheduler.update(step, np.full(len(step.sample), 7, np.int32))
    return seconds


def hashes() -> list[float]:
    """Hash a long prompt, block after block."""
    index = PrefixIndex()
    packed = np.random.default_rng(2).integers(0, 50_000, HASHED).astype(np.int32).tobytes()
    return [timed(lambda: index.extend([], index.root(), packed, BLOCK * 4)) for _ in range(HASHES)]


def imports() -> list[float]:
    """Import the scheduler in fresh processes, numpy included."""
    script = (
        "import sys, time; began = time.perf_counter(); import pagedkv.core.scheduler\n"
        "print(time.perf_counter() - began); sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script]
    return [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(IMPORTS)]
