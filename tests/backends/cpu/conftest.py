"""Every test of the CPU backend runs on both of its paths; without the library the native half is skipped, or fails."""

from __future__ import annotations

import os

import pytest

from pagedkv_cpu import native
from tests.backends.cpu import rig


@pytest.fixture(autouse=True, params=["native", "torch"])
def kernels(request, monkeypatch) -> str:
    """The path of every backend that the rig makes."""
    if request.param == "native" and (reason := native.why_missing()):
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    monkeypatch.setattr(rig, "KERNELS", request.param)
    return request.param
