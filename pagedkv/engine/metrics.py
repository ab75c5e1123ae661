"""What an engine does, in numbers: gauges of now, and counters since its start."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.core.block_pool import BlockPool
from pagedkv.core.scheduler import Scheduler


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """Counters since start; tokens are counted when computed."""

    steps: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMetrics:
    """Blocks of one level now. `used`: by requests; `cached`: unreferenced but findable; `free`: neither.

    `moving`: on their way to the other level or from it, and nobody's.
    """

    used: int
    cached: int
    free: int
    moving: int

    @classmethod
    def of(cls, pool: BlockPool, moving: int) -> PoolMetrics:
        """The gauges of a pool."""
        return cls(used=pool.num_used - moving, cached=pool.num_cached, free=pool.num_free, moving=moving)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """Requests by state and blocks by level now; counters since start; the price of bringing tokens back.

    `block_size`: tokens of a block, as it was given or the backend prefers it.
    `replayed_steps` are those of `steps` that a recording served. `preemptions` counts all of them, `swaps` those whose
    blocks went to host memory; `blocks_saved` and `blocks_fetched` were copied to the host and back. `copy_bandwidth`
    is in bytes a second, `prefill_rate` in tokens a second; from `break_even_tokens` on, copying is cheaper than
    computing again. None is not measured yet.
    """

    running: int
    waiting: int
    swapped: int
    loading: int
    block_size: int
    device: PoolMetrics
    host: PoolMetrics
    steps: int
    replayed_steps: int
    computed_tokens: int
    output_tokens: int
    finished: int
    preemptions: int
    swaps: int
    recomputed_tokens: int
    blocks_saved: int
    blocks_fetched: int
    copy_bandwidth: float | None
    prefill_rate: float | None
    break_even_tokens: float | None


def metrics_of(scheduler: Scheduler, stats: EngineStats, replays: int) -> EngineMetrics:
    """Everything as it is now."""
    tiers, price = scheduler.tiers, scheduler.price
    on_device, on_host = tiers.in_transit()
    return EngineMetrics(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        swapped=len(scheduler.swapped),
        loading=len(scheduler.loading),
        block_size=scheduler.config.block_size,
        device=PoolMetrics.of(tiers.device, on_device),
        host=PoolMetrics.of(tiers.host, on_host),
        steps=stats.steps,
        replayed_steps=replays,
        computed_tokens=stats.computed_tokens,
        output_tokens=stats.output_tokens,
        finished=stats.finished,
        preemptions=scheduler.num_preemptions,
        swaps=scheduler.num_swaps,
        recomputed_tokens=scheduler.num_recomputed_tokens,
        blocks_saved=tiers.num_saved,
        blocks_fetched=tiers.num_fetched,
        copy_bandwidth=price.bandwidth,
        prefill_rate=price.prefill,
        break_even_tokens=price.break_even(scheduler.config.block_size),
    )
