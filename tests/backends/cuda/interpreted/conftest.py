"""These tests run kernels under Triton's interpreter, which must be chosen before Triton is imported: in a process of
its own, started by test_kernels_interpreted.py one folder up, or by hand with TRITON_INTERPRET=1.

KERNEL_ERRORS=FILE leaves there how far each kernel was from float64, by dtype (JSON; errors.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETING else ["test_*.py"]


def pytest_collection_finish(session):
    """Triton decides when it is imported; its own functions show what it decided."""
    if INTERPRETING and session.items:
        import triton.language as tl
        from triton.runtime.interpreter import InterpretedFunction

        if not isinstance(tl.sum, InterpretedFunction):
            pytest.exit("Triton was imported before TRITON_INTERPRET=1 was set: start a process with it set", 4)


@pytest.fixture(scope="session", autouse=True)
def _repaired_interpreter():
    import torch

    from tests.backends.cuda.interpreted import interpreter

    torch.set_num_threads(1)
    interpreter.install()


@pytest.fixture(scope="session", autouse=True)
def _errors_written():
    yield
    if "KERNEL_ERRORS" in os.environ:
        from tests.backends.cuda.interpreted import errors

        errors.write(Path(os.environ["KERNEL_ERRORS"]))
