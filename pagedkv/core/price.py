"""What it costs to bring tokens back: copying their blocks, or computing them again."""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT = 0.2  # of a new measurement


@dataclass(slots=True, kw_only=True)
class Price:
    """Two measured rates and what follows from them; `mode` "swap" or "recompute" decides preemptions without them.

    `block_bytes`: of one block. `bandwidth`: bytes a second of copies between the device and host memory, in one
    direction; `latency`: seconds that a copy takes before the first byte. `prefill`: prompt tokens computed a second.
    None is not known yet, and until both are known copying is taken to be cheaper. `fixed` names what the user gave and
    no measurement changes.
    """

    block_bytes: int
    mode: str = "auto"
    bandwidth: float | None = None
    latency: float = 0.0
    prefill: float | None = None
    fixed: frozenset[str] = frozenset()

    def copying(self, blocks: int) -> float | None:
        """Seconds that `blocks` take in one direction."""
        return None if self.bandwidth is None else self.latency + blocks * self.block_bytes / self.bandwidth

    def computing(self, tokens: int) -> float | None:
        """Seconds that a prompt of `tokens` takes."""
        return None if self.prefill is None else tokens / self.prefill

    def swaps(self, blocks: int, tokens: int) -> bool:
        """Whether to copy `blocks` out and in again rather than to compute the `tokens` in them once more."""
        if self.mode != "auto":
            return self.mode == "swap"
        return self._copies(2, blocks, tokens)

    def fetches(self, blocks: int, tokens: int) -> bool:
        """Whether to copy `blocks` in rather than to compute `tokens`."""
        return self._copies(1, blocks, tokens)

    def _copies(self, times: int, blocks: int, tokens: int) -> bool:
        copying, computing = self.copying(blocks), self.computing(tokens)
        return copying is None or computing is None or times * copying < computing

    def break_even(self, block_size: int) -> float | None:
        """Tokens from which on swapping is cheaper than computing again; infinite where it never is."""
        if self.bandwidth is None or self.prefill is None:
            return None
        gained = 1 / self.prefill - 2 * self.block_bytes / block_size / self.bandwidth
        return 2 * self.latency / gained if gained > 0 else float("inf")

    # -- measurements --------------------------------------------------------------------------------------------------

    def saw_copy(self, blocks: int, least: float, most: float) -> None:
        """A copy of `blocks` took between `least` and `most` seconds: move the bandwidth as little as that asks for."""
        if "bandwidth" in self.fixed or most <= self.latency:
            return
        size = blocks * self.block_bytes
        low = size / (most - self.latency)
        high = size / (least - self.latency) if least > self.latency else float("inf")
        if self.bandwidth is None:
            self.bandwidth = low
        else:
            self.bandwidth += _WEIGHT * (min(max(self.bandwidth, low), high) - self.bandwidth)

    def saw_prefill(self, tokens: int, seconds: float) -> None:
        """A step computed `tokens` of prompts in `seconds`."""
        if "prefill" in self.fixed or seconds <= 0:
            return
        rate = tokens / seconds
        self.prefill = rate if self.prefill is None else self.prefill + _WEIGHT * (rate - self.prefill)
