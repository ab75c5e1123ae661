"""U104: a torch without code for the GPU's capability is said at the start, with what to build or install."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pagedkv.api import BackendUnavailable, World
from pagedkv_cuda import devices, limits, opening
from pagedkv_cuda.capabilities import declared

BUILT = ["sm_80", "sm_86", "sm_89"]


def opened(monkeypatch, capability, *, tegra):
    """What opening a GPU says where torch sees it and was built for `BUILT`."""
    fake = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_properties=lambda index: SimpleNamespace(uuid="orin"),
        get_arch_list=lambda: BUILT,
    )
    monkeypatch.setattr(opening.torch, "cuda", fake)
    monkeypatch.setattr(devices, "is_tegra", lambda: tegra)
    generation = limits.generation(capability)
    with pytest.raises(BackendUnavailable) as raised:
        opening.open_backend(
            "GPU-orin",
            0,
            capability,
            declared(generation, "triton"),
            kernels="triton",
            world=World(),
        )
    return str(raised.value)


def test_u104_the_start_says_what_is_built_what_is_there_and_what_to_build(monkeypatch):
    said = opened(monkeypatch, (8, 7), tegra=True)
    assert f"is built for {', '.join(BUILT)}, and none of that runs on compute capability 8.7" in said
    assert said.endswith(
        "install a torch that is built for sm_87, build one with TORCH_CUDA_ARCH_LIST=8.7, or choose backend cpu"
    )


@pytest.mark.parametrize(("capability", "wanted"), [((9, 0), "sm_90"), ((12, 0), "sm_120"), ((7, 5), "sm_75")])
def test_u104_so_on_any_gpu_that_was_left_out(monkeypatch, capability, wanted):
    assert f"install a torch that is built for {wanted}," in opened(monkeypatch, capability, tegra=False)


def test_u104_code_of_the_same_major_number_runs_except_on_tegra():
    assert opening.why_no_code((8, 7), BUILT, tegra=False) is None
    assert opening.why_no_code((8, 9), BUILT, tegra=False) is None
    assert opening.why_no_code((8, 7), [*BUILT, "compute_80"], tegra=True) is None


def test_u104_a_torch_without_any_gpu_code():
    said = opening.why_no_code((8, 7), [], tegra=True)
    assert said is not None and "is built for no GPU at all" in said
