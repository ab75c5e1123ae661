"""What a case of the kit works with: the backend under test, specs that it accepts, rigs, figures to report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from pagedkv.api import AttentionBackend, Capabilities, GroupSpec, LayerSpec, Limits, PoolSpec, World, needs
from pagedkv.conformance.lattice import HEAD_DIMS, PLAIN, sizes
from pagedkv.conformance.rig import Rig
from pagedkv.conformance.subject import Subject
from pagedkv.core.negotiation import accepts

Record = Callable[[str, Any], None]


class Kit:
    """One case's view of the backend under test. Everything made here is closed when the case ends."""

    def __init__(self, subject: Subject, record: Record, *, checked: bool = True) -> None:
        self.subject, self._record, self._checked = subject, record, checked
        self._rigs: list[Rig] = []
        self._own: list[AttentionBackend] = []

    def close(self) -> None:
        """Close pools first, then instances."""
        for rig in self._rigs:
            rig.close()
        for backend in self._own:
            backend.close()

    # -- the backend ---------------------------------------------------------------------------------------------------

    @property
    def backend(self) -> AttentionBackend:
        """The instance that cases share; it must not be closed or broken."""
        return self.subject.backend if self._checked else self.subject.unchecked

    @property
    def can(self) -> Capabilities:
        """What it declares."""
        return self.subject.capabilities

    def has(self, feature: str) -> bool:
        return feature in self.can.features

    def create(self, world: World | None = None) -> AttentionBackend:
        """An instance of this case's own, closed when it ends."""
        made = self.subject.create(world, checked=self._checked)
        self._own.append(made)
        return made

    # -- specs it accepts ----------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> str:
        """fp32 where it is declared, because its tolerance is the smallest; else the first."""
        return "fp32" if "fp32" in self.can.dtypes else self.can.dtypes[0]

    @property
    def kv_dtype(self) -> str:
        """That of the keys and values themselves where it is declared; else the first, one that is not quantized."""
        plain = [name for name in self.can.kv_dtypes if name in PLAIN]
        return self.dtype if self.dtype in plain else (plain or self.can.kv_dtypes)[0]

    @property
    def block_size(self) -> int:
        """The smallest accepted of at least 4 (else the preferred), so that few tokens fill several blocks."""
        for size in range(4, 65):
            if accepts(self.can.block_sizes, size):
                return size
        return self.can.preferred_block_size

    @property
    def head_dim(self) -> int:
        """A small accepted one."""
        small = [size for size in (16, 8, 32, 64) if accepts(self.can.head_dims, size)]
        return small[0] if small else min(sizes(self.can.head_dims, HEAD_DIMS))

    @property
    def group(self) -> int:
        """Query heads of a KV head: 3 where allowed, which no power of two hides."""
        return min(3, self.can.max_group or 3)

    def layer(self, index: int = 0, **changes: Any) -> LayerSpec:
        """A small layer: 2 KV heads, `group` query heads each."""
        fields: dict[str, Any] = {"kv_heads": 2, "k_dim": self.head_dim, "v_dim": self.head_dim} | changes
        fields.setdefault("q_heads", self.group * fields["kv_heads"])
        fields.setdefault("scale", fields["k_dim"] ** -0.5)
        return LayerSpec(index=index, **fields)

    def spec(self, *layers: LayerSpec, groups: Iterable[GroupSpec] | None = None, **changes: Any) -> PoolSpec:
        """A pool for one group of `layers` (default: one plain layer), or for `groups`."""
        size, kv_dtype = changes.pop("block_size", self.block_size), changes.pop("kv_dtype", self.kv_dtype)
        one = GroupSpec(layers=layers or (self.layer(),), block_size=size, kv_dtype=kv_dtype)
        chosen = (one,) if groups is None else tuple(groups)
        fields: dict[str, Any] = {
            "groups": chosen,
            "num_blocks": 48,
            "dtype": self.dtype,
            "limits": Limits(rows=16, tokens=max(256, 8 * size), context=max(2048, 8 * size)),
            "features": self.can.features & {"mixed_batch", "prefix_hit"} | _needed(chosen),
        }
        return PoolSpec(**(fields | changes))

    def rig(self, *layers: LayerSpec, backend: AttentionBackend | None = None, **changes: Any) -> Rig:
        """A pool with a small core around it, its layers' parameters bound and its blocks poisoned.

        Keywords: `seed`, `group` of the rig, `poison=False` to leave the blocks as allocated, any field of `PoolSpec`.
        """
        seed, group, poison = changes.pop("seed", 0), changes.pop("group", 0), changes.pop("poison", True)
        rig = Rig(backend or self.backend, self.spec(*layers, **changes), seed=seed, group=group)
        self._rigs.append(rig)
        for one in rig.group.layers:
            rig.bind(one)
        if poison and rig.spec.placement == "device":
            rig.poison(nan=self.has("nan_safe"))
        return rig

    # -- results -------------------------------------------------------------------------------------------------------

    def same(self, rig: Rig, got: Any, wanted: Any, mistake: str = "") -> None:
        """Two results of the backend are equal: bit for bit where it is deterministic, else within the tolerance."""
        if self.has("deterministic"):
            assert_same_bits(got, wanted, mistake)
        else:
            self.check(rig, got, wanted, mistake=mistake)

    def check(self, rig: Rig, got: Any, wanted: Any, *, tolerance: float | None = None, mistake: str = "") -> None:
        """`got` equals the oracle's `wanted` within the tolerance; the worst error goes into the certificate.

        `mistake`: what is likely wrong if it does not, for the author who reads the message.
        """
        limit = rig.tolerance if tolerance is None else tolerance
        got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
        assert got.shape == wanted.shape, f"shape {got.shape}, expected {wanted.shape}"
        error = float(np.abs(got - wanted).max(initial=0.0)) if np.isfinite(got).all() else math.inf
        self._record("check", (error, limit))
        where = _worst(got, wanted)
        assert error <= limit, _said(f"worst error {error:.3g}{where}, allowed {limit:.3g}", mistake)

    def report(self, name: str, value: Any) -> None:
        """A figure for the certificate."""
        self._record(name, value)


def _needed(groups: Iterable[GroupSpec]) -> set[str]:
    return {feature for group in groups for layer in group.layers for feature in needs(layer)}


def assert_same_bits(got: Any, wanted: Any, mistake: str = "") -> None:
    """Two arrays hold the same numbers to the last bit; NaN equals NaN, and zeros of either sign are equal."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape, f"shape {got.shape}, expected {wanted.shape}"
    same = np.array_equal(got, wanted, equal_nan=True)
    assert same, _said(f"{int((got != wanted).sum())} of {got.size} values differ{_worst(got, wanted)}", mistake)


def _said(fact: str, mistake: str) -> str:
    return f"{fact}: {mistake}" if mistake else fact


def _worst(got: Any, wanted: Any) -> str:
    if not got.size:
        return ""
    flat = int(np.argmax(np.nan_to_num(np.abs(got - wanted), nan=np.inf)))
    return f" at {tuple(int(i) for i in np.unravel_index(flat, got.shape))}"
