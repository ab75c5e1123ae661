"""For all tests: they send Ctrl-C to commands, which a shell's background job would have its children ignore."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _imports_are_looked_through_once() -> Iterator[None]:
    """What is loaded before a module stays: collections that go through it take a sixth of the tests' time."""
    gc.collect()
    gc.freeze()
    yield


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries look at exit whether all of theirs is gone
