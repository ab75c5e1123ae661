"""The loopback backend's entry point: what it declares, and its options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pagedkv.api import AttentionBackend, BackendUnavailable, Capabilities, Descriptor, DeviceInfo, Option, World
from pagedkv.api.errors import ConfigError
from pagedkv.api.extensions import CANONICAL_KV_VERSION, GRAPH_VERSION

ORDERS = ("late", "early", "random")
EXTENSIONS = {"graph": GRAPH_VERSION, "canonical_kv": CANONICAL_KV_VERSION}
FEATURES = frozenset(
    {
        "window",
        "softcap",
        "sinks",
        "alibi",
        "non_causal",
        "kv_sharing",
        "multi_token_decode",
        "mixed_batch",
        "prefix_hit",
        "nan_safe",
        "deterministic",
        "batch_invariant",
        "lse",
    }
)


class LoopbackDescriptor(Descriptor):
    """One device, index 0, made of nothing but host memory that is treated as if it were far away."""

    name = "loopback"
    api = (1, 0)
    options = (
        Option.of(name="memory", type=int, default=1 << 30, help="bytes of the device's memory"),
        Option.of(
            name="order",
            type=str,
            default="late",
            help="when copies run: late (when waited for), early (at the first legal moment), random",
        ),
        Option.of(name="seed", type=int, default=0, help="of order=random"),
        Option.of(
            name="fail_at",
            type=int,
            default=0,
            help="the attend, counted from 1, that fails the device; 0 is never",
        ),
        Option.of(
            name="without", type=str, default="", help="features and extensions to leave undeclared, comma between"
        ),
    )

    def probe(self) -> tuple[DeviceInfo, ...]:
        return (DeviceInfo.of(index=0, kind="reference of the contract, exact and slow, for tests", score=0),)

    def describe(self, device: DeviceInfo) -> Capabilities:
        return Capabilities.of(
            dtypes=("fp32", "bf16", "fp16"),
            kv_dtypes=("fp32", "bf16", "fp16", "int8/token_head", "fp8_e4m3fn/tensor", "fp8_e5m2/tensor"),
            block_sizes=((1, 1, 4096),),
            head_dims=((1, 1, 512),),
            preferred_block_size=16,
            features=FEATURES,
            placements=frozenset({"device", "host"}),
            extensions=EXTENSIONS,
            graph="any",
            async_copy=True,
            collectives=frozenset({"all_reduce", "all_gather", "broadcast", "barrier"}),
        )

    def create(self, device: int, options: Mapping[str, Any], world: World) -> AttentionBackend:
        if device != 0:
            raise BackendUnavailable(f"the loopback backend has one device, index 0, and was asked for {device}")
        given = {option.name: options.get(option.name, option.default) for option in self.options}
        _check(given)
        from pagedkv.conformance.loopback.backend import LoopbackBackend

        capabilities = _without(self.describe(self.probe()[0]), given.pop("without"))
        return LoopbackBackend(capabilities, world, **given)


def _check(given: Mapping[str, Any]) -> None:
    """`ConfigError` for the first value that is out of range."""
    if given["order"] not in ORDERS:
        raise ConfigError(f"backend option order={given['order']!r}: give one of {', '.join(ORDERS)}")
    for name in ("memory", "seed", "fail_at"):
        if given[name] < 0:
            raise ConfigError(f"backend option {name}={given[name]}: give a number from 0 on")


def _without(capabilities: Capabilities, text: str) -> Capabilities:
    """The capabilities less the features and extensions named in `text`."""
    names = {name.strip() for name in text.split(",") if name.strip()}
    unknown = sorted(names - FEATURES - EXTENSIONS.keys())
    if unknown:
        known = ", ".join(sorted(FEATURES | EXTENSIONS.keys()))
        raise ConfigError(f"backend option without names {', '.join(unknown)}; it may name {known}")
    return dataclasses.replace(
        capabilities,
        features=capabilities.features - names,
        extensions={name: version for name, version in EXTENSIONS.items() if name not in names},
        graph="none" if "graph" in names else capabilities.graph,
    )
