"""These tests run kernels under Triton's interpreter, which must be chosen before Triton is imported: in a process of
its own, started by test_kernels_interpreted.py one folder up, or by hand with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETING else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _repaired_interpreter():
    import torch

    from tests.backends.cuda.interpreted import interpreter

    torch.set_num_threads(1)
    interpreter.install()
