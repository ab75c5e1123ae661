"""Counters and histograms as plain numbers, shown as Prometheus has them. All belong to one event loop: no locks.

The library's own take a lock and a walk over the buckets for each observation; a step may bring hundreds of equal ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

Labels: TypeAlias = "tuple[str, ...]"

MODEL = "model_name"
"""The label that every series of ours has."""
OTHER = "other"
"""What a label says of a value that is none of the known ones, so that no client can make series."""


class Counter:
    """Numbers that only grow, one for each combination of labels; those of `series` are there from the start."""

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str] = (), series: Iterable[Labels] = ((),)
    ) -> None:
        self.name, self.documentation, self.labels = name, documentation, tuple(labels)
        self.values: dict[Labels, float] = dict.fromkeys(series, 0)

    def add(self, *labels: str, amount: float = 1) -> None:
        """Count `amount` more."""
        self.values[labels] = self.values.get(labels, 0) + amount

    def family(self, model: str) -> CounterMetricFamily:
        """All of it, as of now."""
        family = CounterMetricFamily(self.name, self.documentation, labels=(MODEL, *self.labels))
        for labels, value in self.values.items():
            family.add_metric((model, *labels), value)
        return family


class Tally:
    """How many values lie in each bucket, and their sum. `bounds` are the buckets' upper ends, inclusive, ascending."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Take in `times` equal values."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Upper ends with the number of values up to each, the last without an end."""
        ends = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(ends, accumulate(self.counts), strict=True))


class Histogram:
    """Tallies under one name, one for each combination of labels of `series`."""

    def __init__(
        self,
        name: str,
        documentation: str,
        bounds: Sequence[float],
        labels: Sequence[str] = (),
        series: Iterable[Labels] = ((),),
    ) -> None:
        self.name, self.documentation, self.labels = name, documentation, tuple(labels)
        self.tallies = {each: Tally(bounds) for each in series}

    def add(self, value: float, times: int = 1, labels: Labels = ()) -> None:
        """Take in `times` equal values."""
        self.tallies[labels].add(value, times)

    def family(self, model: str) -> HistogramMetricFamily:
        """All of it, as of now."""
        family = HistogramMetricFamily(self.name, self.documentation, labels=(MODEL, *self.labels))
        for labels, tally in self.tallies.items():
            family.add_metric((model, *labels), tally.buckets(), tally.sum)
        return family
