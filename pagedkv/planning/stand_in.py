"""In the place of a backend whose device is not here, or has other memory: it answers and allocates nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pagedkv.api import (
    AttentionBackend,
    Batch,
    Capabilities,
    Descriptor,
    DeviceInfo,
    Event,
    MemoryInfo,
    OpSpec,
    Plan,
    Pool,
    PoolCost,
    PoolSpec,
    World,
    needs,
)
from pagedkv.api.backend import DEFAULT_FRACTION
from pagedkv.api.errors import BackendUnavailable, UnsupportedError
from pagedkv.api.records import Int32, LayerSpec
from pagedkv.planning.cost import formula_cost
from pagedkv.planning.devices import Device

_FEATURES = {"mixed_batch", "prefix_hit", "nan_safe"}


class StandIn(AttentionBackend):
    """Capabilities and memory as given; cost and ops are those of `inner`, without one the formula and none.

    With a `reserve` the memory is a host's, which keeps so many bytes, and the share is one of what is available.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        memory: MemoryInfo,
        *,
        fraction: float | None = None,
        reserve: int | None = None,
        inner: AttentionBackend | None = None,
    ) -> None:
        self._capabilities, self._memory = capabilities, memory
        self._fraction, self._reserve, self._inner = fraction, reserve, inner

    @property
    def torch_device(self) -> str:
        """That of the backend it stands for; nothing is put there."""
        return "cpu" if self._inner is None else self._inner.torch_device

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def memory(self) -> MemoryInfo:
        """What it was given."""
        return self._memory

    def kv_budget(self, fraction: float | None, reserved: int) -> int | None:
        """The contract's formula, or that of shared memory; the device's own share where none is given."""
        share = self._fraction if fraction is None else fraction
        if self._reserve is None or self._memory.free is None:
            return super().kv_budget(share, reserved)
        return max(0, int((share or DEFAULT_FRACTION) * self._memory.free) - self._reserve - reserved)

    def pool_cost(self, spec: PoolSpec) -> PoolCost:
        return formula_cost(spec) if self._inner is None else self._inner.pool_cost(spec)

    def op(self, name: str, spec: OpSpec) -> Callable[..., Any] | None:
        """The inner backend's; without one, whatever multiplies weights in the formats that are declared."""
        if self._inner is not None:
            return self._inner.op(name, spec)
        return _refused if spec.attributes.get("format") in self._capabilities.weight_formats else None

    def close(self) -> None:
        """Close the inner backend."""
        if self._inner is not None:
            self._inner.close()

    def alloc_pool(self, spec: PoolSpec) -> Pool:
        raise _refusal()

    def plan(self, pool: Pool, group: int, batch: Batch) -> Plan:
        raise _refusal()

    def attend(
        self, plan: Any, layer: int, q: Any, k: Any, v: Any, out: Any, *, extra: Mapping[str, Any] | None = None
    ) -> None:
        raise _refusal()

    def copy_blocks(self, src: Pool, dst: Pool, pairs: Int32, *, after: Event | None = None) -> Event:
        raise _refusal()


def _refusal() -> UnsupportedError:
    return UnsupportedError("this stands for a device that is not here: it answers questions and runs nothing")


def _refused(*_: Any) -> Any:
    raise _refusal()


class Absent(Descriptor):
    """The descriptor of a backend that is not installed: what any backend of such a device can be expected to do."""

    def __init__(self, device: Device) -> None:
        self.name, self.api, self._device = device.backend, (1, 0), device

    def probe(self) -> tuple[DeviceInfo, ...]:
        return ()

    def describe(self, device: DeviceInfo) -> Capabilities:
        dtypes = tuple(self._device.peak)
        return Capabilities(
            dtypes=dtypes,
            kv_dtypes=dtypes,
            block_sizes=((1, 1, 1024),),
            head_dims=((1, 1, 512),),
            preferred_block_size=self._device.block_size,
            features=frozenset(_FEATURES | _layer_features()),
            placements=frozenset({"device", "host"}),
        )

    def create(self, device: int, options: Mapping[str, Any], world: World) -> AttentionBackend:
        raise BackendUnavailable(f"backend {self.name!r} is not installed")


def _layer_features() -> set[str]:
    """Every feature that a layer can need."""
    off = LayerSpec(index=0, q_heads=1, kv_heads=1, k_dim=1, v_dim=1, scale=1.0, causal=False, window=1, softcap=1.0)
    on = LayerSpec(index=1, q_heads=1, kv_heads=1, k_dim=1, v_dim=1, scale=1.0, sinks=True, alibi=True, kv_of=0)
    return {*needs(off), *needs(on)}
