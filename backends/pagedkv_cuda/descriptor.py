"""The CUDA backend's entry point: what can be said about the GPUs here without torch, Triton or a context."""

from __future__ import annotations

import logging
import os
import re
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
from pagedkv_cuda import devices, diagnose, limits, packages
from pagedkv_cuda.capabilities import KERNELS, declared, offered
from pagedkv_cuda.devices import DriverMissing, Gpu
from pagedkv_cuda.limits import Capability, Generation, spell

_log = logging.getLogger("pagedkv.backends.cuda")

ASK_FOR_TORCH = 'backend_options={"kernels": "torch"} runs attention by torch\'s operators instead, slower'
ENOUGH_FREE = 0.9
"""A share of a GPU's memory that is the engine's default: what others hold beyond the rest is told at the start."""
TEGRA = "this is a Tegra board, whose GPU shares the processor's memory: choose backend jetson"


class CudaDescriptor(Descriptor):
    """NVIDIA's GPUs that this process may see, numbered by PCI address or as CUDA_VISIBLE_DEVICES lists them."""

    name = "cuda"
    api = (1, 0)
    options = (
        Option.of(
            name="kernels",
            type=str,
            default="triton",
            help="triton: kernels of our own, from compute capability 8.0 on; torch: torch's operators, slower",
        ),
        Option.of(
            name="disable_custom_all_reduce",
            type=bool,
            default=False,
            help="accepted, without effect: collectives are NCCL's alone",
        ),
    )

    def probe(self) -> tuple[DeviceInfo, ...]:
        if devices.is_tegra():
            return (_unusable("Tegra", TEGRA),)
        try:
            with devices.nvml() as module:
                found = devices.visible_now(module)
                driver = devices.driver_cuda(module)
        except DriverMissing as error:
            return (_unusable("no GPU can be asked", str(error)),) if devices.has_driver() else (_no_driver(),)
        if not found:
            return (_unusable("none visible", _why_none_visible()),)
        reason = packages.why_no_torch(driver)
        return tuple(device_info(number, gpu, reason) for number, gpu in enumerate(found))

    def describe(self, device: DeviceInfo) -> Capabilities:
        return offered(generation_of(device))

    def create(self, device: int, options: Mapping[str, Any], world: World) -> AttentionBackend:
        kernels = _kernels(options)
        info = next((one for one in self.probe() if one.index == device), None)
        if info is None or (info.score == 0 and info.reason):
            raise BackendUnavailable(f"CUDA device {device}: {info.reason if info else 'there is none'}")
        capability, generation = capability_of(info), generation_of(info)
        if kernels == "triton" and (reason := why_no_kernels(capability, generation)):
            raise BackendUnavailable(f"{info.kind}: {reason}; {ASK_FOR_TORCH}")
        if options.get("disable_custom_all_reduce"):
            _log.info("disable_custom_all_reduce: nothing to disable, collectives are NCCL's alone")
        return self._open(
            device,
            capability,
            declared(generation, kernels),
            options,
            kernels=kernels,
            world=world,
        )

    def _open(
        self, device: int, capability: Capability, can: Capabilities, options: Mapping[str, Any], **more: Any
    ) -> AttentionBackend:
        """The last step of `create`, after all checks that need no torch; what extends this backend replaces it."""
        from pagedkv_cuda.opening import open_backend

        uuid = self._uuid(device)
        self._tell_what_is_taken(device, uuid)
        return open_backend(uuid, device, capability, can, **more)

    def _tell_what_is_taken(self, device: int, uuid: str) -> None:
        """A warning where others have taken so much that the cache will be smaller for it."""
        info = next(one for one in self.probe() if one.index == device)
        if info.total is None or info.free is None or info.free >= ENOUGH_FREE * info.total:
            return
        _log.warning(
            "CUDA device %d: %s of %s are taken (%s) and the cache gets what is left: end what is not needed, or "
            "choose another GPU with device=N",
            device,
            devices.gib(info.total - info.free),
            devices.gib(info.total),
            devices.holders_of(uuid) or "the driver names no process",
        )

    def diagnose(self) -> Mapping[str, str]:
        return diagnose.report()

    def _uuid(self, device: int) -> str:
        """The device's UUID, by which torch's numbering is checked."""
        with devices.nvml() as module:
            gpu = devices.visible_now(module)[device]
        return "" if gpu.mig else gpu.uuid


def device_info(number: int, gpu: Gpu, reason: str | None) -> DeviceInfo:
    """A GPU as the core sees it; `reason`: what speaks against every GPU here."""
    if gpu.capability is None:
        return _of(number, gpu, 0, "the driver does not tell its compute capability: update the driver")
    if gpu.capability < limits.LEAST:
        said = f"compute capability {spell(gpu.capability)} is below {spell(limits.LEAST)}, today's torch has no code"
        return _of(number, gpu, 0, f"{said} for it: choose another GPU")
    score = limits.score(gpu.capability)
    if reason := reason or _why_not(gpu.capability, score):
        return _of(number, gpu, 0, reason)
    return _of(number, gpu, score, _why(gpu.capability, score))


def _why_not(capability: Capability, score: int) -> str | None:
    """What speaks against a GPU of this capability: torch's age, or no Triton where its kernels are the default."""
    generation = limits.generation(capability)
    too_old = packages.why_too_old(generation) if generation else None
    return too_old or (packages.why_no_triton() if score > limits.PORTABLE else None)


def _of(number: int, gpu: Gpu, score: int, reason: str) -> DeviceInfo:
    capability = "unknown" if gpu.capability is None else spell(gpu.capability)
    kind = f"{gpu.name}, compute capability {capability}"
    return DeviceInfo.of(index=number, kind=kind, total=gpu.total, free=gpu.free, score=score, reason=reason)


def _why(capability: Capability, score: int) -> str:
    generation = limits.generation(capability)
    name = generation.name if generation else "unknown"
    if score == limits.NATIVE:
        return f"native, {name}"
    if score == limits.GENERIC:
        return f"generic: no tile sizes of its own, those of {name} are used"
    return f"portable: {generation.why_not if generation else ''}; {ASK_FOR_TORCH}"


def _unusable(kind: str, reason: str) -> DeviceInfo:
    return DeviceInfo.of(index=0, kind=kind, score=0, reason=reason)


def _no_driver() -> DeviceInfo:
    return _unusable("no GPU", "no driver of NVIDIA's is loaded: install it, or choose another backend")


def _why_none_visible() -> str:
    variable = os.environ.get(devices.VISIBLE)
    if variable is None:
        return "the driver lists no GPU: look at nvidia-smi"
    return f"{devices.VISIBLE}={variable!r} leaves none: unset it, or name a GPU that nvidia-smi -L lists"


def capability_of(device: DeviceInfo) -> Capability:
    """The compute capability in a device's kind; that of the oldest generation where there is none."""
    found = re.search(r"compute capability (\d+\.\d+)", device.kind)
    return limits.parse(found[1]) if found else limits.LEAST


def generation_of(device: DeviceInfo) -> Generation:
    """The device's generation, or the nearest older one."""
    return limits.generation(capability_of(device)) or limits.generations()[0]


def why_no_kernels(capability: Capability, generation: Generation) -> str | None:
    """What keeps Triton's kernels from this GPU."""
    if not generation.triton:
        return f"Triton's kernels need compute capability 8.0, this is {spell(capability)}: {generation.why_not}"
    return packages.why_no_triton()


def _kernels(options: Mapping[str, Any]) -> str:
    kernels = str(options.get("kernels", KERNELS[0]))
    if kernels not in KERNELS:
        raise ConfigError(f"backend option kernels={kernels!r}: give one of {', '.join(KERNELS)}")
    return kernels
