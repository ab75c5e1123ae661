"""The least time that a decode step can take on this machine: what it must read, over how fast memory is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagedkv.planning.cost import read_bytes

if TYPE_CHECKING:
    from pagedkv.engine.setup import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Bytes that a decode step of a batch reads: weights as they are held, keys and values at the middle of the run."""

    weights: int
    cache: int
    bandwidth: float

    @property
    def seconds(self) -> float:
        """The least time of the step."""
        return (self.weights + self.cache) / self.bandwidth

    def figures(self, between: float | None) -> dict[str, Any]:
        """As JSON values; `between` is the measured time between tokens, `achieved` the share of it that is floor."""
        return {
            "weight_bytes": self.weights,
            "cache_bytes": self.cache,
            "read_bandwidth": self.bandwidth,
            "seconds": self.seconds,
            "achieved": None if between is None else self.seconds / between,
        }


def floor(parts: Parts, batch: int, input_len: int, output_len: int, bandwidth: float) -> Floor:
    """The floor of a decode step of `batch` requests, half of their answers done."""
    cached = sum(read_bytes(group, input_len + output_len // 2) for group in parts.runner.pool.spec.groups)
    return Floor(weights=parts.runner.model.bytes_per_step, cache=batch * cached, bandwidth=bandwidth)
