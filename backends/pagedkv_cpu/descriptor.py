"""The CPU backend's entry point: what can be said about this processor without loading torch."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from pagedkv.api import (
    AttentionBackend,
    BackendUnavailable,
    Capabilities,
    Descriptor,
    DeviceInfo,
    Option,
    World,
)
from pagedkv.api.errors import ConfigError
from pagedkv.api.extensions import CANONICAL_KV_VERSION
from pagedkv_cpu import host, native

_log = logging.getLogger("pagedkv.backends.cpu")

KERNELS = ("auto", "native", "torch")
_NO_TORCH = "torch is not installed: pip install torch"
_BUILD = "`pip install --force-reinstall --no-deps .` in the clone"
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


COLLECTIVES = frozenset({"all_reduce", "all_gather", "broadcast", "barrier"})
EXTENSIONS = {"canonical_kv": CANONICAL_KV_VERSION} if sys.byteorder == "little" else {}
"""The canonical bytes are little endian, and exported as they lie."""


class CpuDescriptor(Descriptor):
    """The processor of this machine, as one device with index 0."""

    name = "cpu"
    api = (1, 0)
    options = (
        Option.of(
            name="threads",
            type=int,
            default=0,
            help="threads of every computation; 0 takes the cores this process may use",
            aliases=("num_threads",),
        ),
        Option.of(
            name="kernels",
            type=str,
            default="auto",
            help="native: the kernels in C++; torch: torch's operators; auto: native where they were built",
        ),
        Option.of(
            name="isa",
            type=str,
            default="auto",
            help=f"instruction set of the native kernels: {', '.join(native.ISAS)}",
        ),
    )

    def probe(self) -> tuple[DeviceInfo, ...]:
        memory, cores = host.memory(), host.cores()
        usable = importlib.util.find_spec("torch") is not None
        device = DeviceInfo.of(
            index=0,
            kind=f"{host.cpu_model()}, {cores.usable} of {cores.present} cores{_cost_of_torch()}",
            total=memory.total,
            free=memory.available,
            unified=True,
            score=10 if usable else 0,
            reason="portable" if usable else _NO_TORCH,
        )
        return (device,)

    def describe(self, device: DeviceInfo) -> Capabilities:
        fast = host.native_dtypes(host.isa_flags(), os.environ.get("ONEDNN_MAX_CPU_ISA"))
        return Capabilities.of(
            dtypes=("fp32", "bf16", "fp16"),
            native_dtypes=fast,
            kv_dtypes=("fp32", "bf16", "fp16"),
            block_sizes=((1, 1, 4096),),
            head_dims=((1, 1, 512),),
            preferred_block_size=16,
            features=FEATURES,
            placements=frozenset({"device", "host"}),
            async_copy=True,
            collectives=COLLECTIVES,
            weight_formats=frozenset(native.FORMATS) if native.LIBRARY.exists() else frozenset(),
            extensions=EXTENSIONS,
            exclusions=(
                (
                    {"dtype": frozenset({"bf16", "fp16"}), "feature": "batch_invariant"},
                    "only fp32 is batch invariant on the CPU: choose dtype float32",
                ),
            ),
        )

    def create(self, device: int, options: Mapping[str, Any], world: World) -> AttentionBackend:
        if device != 0:
            raise BackendUnavailable(f"the CPU backend has one device, index 0, and was asked for {device}")
        if importlib.util.find_spec("torch") is None:
            raise BackendUnavailable(_NO_TORCH)
        threads = int(options.get("threads", 0))
        if threads < 0:
            raise ConfigError(f"backend option threads={threads}: give 0 (all usable cores) or a positive number")
        from pagedkv_cpu.backend import CpuBackend

        threads = threads or host.cores().usable
        kernels = _kernels(str(options.get("kernels", "auto")), str(options.get("isa", "auto")), threads)
        return CpuBackend(self.describe(self.probe()[0]), threads=threads, kernels=kernels, world=world)

    def diagnose(self) -> Mapping[str, str]:
        memory, cores, flags = host.memory(), host.cores(), host.isa_flags()
        missing = native.why_missing()
        return {
            "model": host.cpu_model(),
            "instructions": " ".join(name for name in host.ISA_FLAGS if name in flags) or "none listed",
            "native dtypes": " ".join(self.describe(self.probe()[0]).native_dtypes),
            "cores": f"{cores.usable} of {cores.present} ({cores.source})",
            "memory": f"{_gib(memory.available)} free of {_gib(memory.total)} ({memory.source})",
            "kernels": f"{missing}; {native.WITHOUT}" if missing else f"native, {native.Kernels().isa}",
            "torch": "found" if importlib.util.find_spec("torch") is not None else _NO_TORCH,
            **({"change kernels": f"{missing}; until then it is {native.WITHOUT}: {_BUILD}"} if missing else {}),
        }


def _kernels(kernels: str, isa: str, threads: int) -> native.Kernels | None:
    """The kernels as asked for; None for torch alone. An explicit choice that cannot be met is refused."""
    if kernels not in KERNELS:
        raise ConfigError(f"backend option kernels={kernels!r}: give one of {', '.join(KERNELS)}")
    if isa not in native.ISAS:
        raise ConfigError(f"backend option isa={isa!r}: give one of {', '.join(native.ISAS)}")
    if kernels == "torch":
        if isa != "auto":
            raise ConfigError(f"backend option isa={isa!r} needs the native kernels, not kernels=torch")
        _log.info("computing with torch's operators, %d threads", threads)
        return None
    try:
        made = native.Kernels(isa, threads)
    except OSError as error:
        if kernels == "native" or isa != "auto":
            raise BackendUnavailable(f"backend options kernels={kernels!r}, isa={isa!r}: {error}") from error
        _log.warning(
            "%s. Computing with torch alone, which is %s (measured: docs/performance.md)", error, native.WITHOUT
        )
        return None
    _log.info("native kernels, %s, %d threads", made.isa, threads)
    return made


def _cost_of_torch() -> str:
    """What a listing of devices says where the kernels are missing; nothing where they are there."""
    return f", no native kernels: {native.WITHOUT}" if native.why_missing() else ""


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"
