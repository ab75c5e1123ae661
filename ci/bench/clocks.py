"""Clocks around calls, and what the clocks themselves cost."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

NATIVE = "native"
_PROBES = 20_000


@dataclass(slots=True)
class Total:
    """What one clock saw: calls, seconds within them, and the same of compiled functions called on the way."""

    calls: int = 0
    seconds: float = 0.0
    native_calls: int = 0
    native_seconds: float = 0.0

    def __sub__(self, other: Total) -> Total:
        return Total(
            self.calls - other.calls,
            self.seconds - other.seconds,
            self.native_calls - other.native_calls,
            self.native_seconds - other.native_seconds,
        )


class Clocks:
    """Totals by name. The clock `NATIVE` runs inside of the others, which therefore know how much of them it was."""

    def __init__(self) -> None:
        self.totals: dict[str, Total] = {NATIVE: Total()}

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, counted under `name`; an op keeps its `pack`."""
        mine, native = self.totals.setdefault(name, Total()), self.totals[NATIVE]
        now = time.perf_counter

        def timed(*args: Any, **named: Any) -> Any:
            calls, seconds = native.calls, native.seconds
            began = now()
            result = call(*args, **named)
            mine.seconds += now() - began
            mine.calls += 1
            mine.native_calls += native.calls - calls
            mine.native_seconds += native.seconds - seconds
            return result

        if hasattr(call, "pack"):
            timed.pack = call.pack  # type: ignore[attr-defined]
        return timed

    def around_native(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call of a compiled function, which takes no keywords."""
        mine, now = self.totals[NATIVE], time.perf_counter

        def timed(*args: Any) -> Any:
            began = now()
            result = call(*args)
            mine.seconds += now() - began
            mine.calls += 1
            return result

        return timed

    def snapshot(self) -> dict[str, Total]:
        """The totals as they are now."""
        return {name: replace(total) for name, total in self.totals.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds that a clock adds to each call: `inside` of what it measures, and `whole`, as its caller sees it."""

    inside: float
    whole: float
    native_inside: float
    native_whole: float

    def corrected(self, total: Total) -> tuple[float, float]:
        """(seconds, native seconds) as they were without clocks."""
        seconds = total.seconds - total.calls * self.inside - total.native_calls * self.native_whole
        return seconds, total.native_seconds - total.native_calls * self.native_inside

    def added(self, totals: dict[str, Total]) -> float:
        """Seconds that all clocks added together."""
        outer = sum(total.calls for name, total in totals.items() if name != NATIVE)
        return outer * self.whole + totals[NATIVE].calls * self.native_whole


def clock_cost() -> Cost:
    """Measured on a function that does nothing."""

    def nothing(*args: object) -> None:
        return None

    plain = _each(nothing)
    clocks = Clocks()
    whole = _each(clocks.around("probe", nothing))
    native_whole = _each(clocks.around_native(nothing))
    probe, native = clocks.totals["probe"], clocks.totals[NATIVE]
    return Cost(
        inside=max(0.0, probe.seconds / probe.calls - plain),
        whole=max(0.0, whole - plain),
        native_inside=max(0.0, native.seconds / native.calls - plain),
        native_whole=max(0.0, native_whole - plain),
    )


def _each(call: Callable[..., Any]) -> float:
    """Seconds of one call with a few arguments, from many in a row."""
    began = time.perf_counter()
    for _ in range(_PROBES):
        call(0, 1, 2, 3)
    return (time.perf_counter() - began) / _PROBES


def is_compiled(value: Any) -> bool:
    """Whether this is a function of a library, as ctypes gives it."""
    return isinstance(value, ctypes._CFuncPtr)  # type: ignore[attr-defined]
