"""What a call must raise, and what it means when it raises nothing or something else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from pagedkv.api.errors import PagedKVError

Errors = type[PagedKVError] | tuple[type[PagedKVError], ...]

_NAMED = "UnsupportedError, ContractViolation, OutOfDeviceMemory and DeviceError are all that a backend may raise"


@contextlib.contextmanager
def refuses(error: Errors, what: str, *naming: object) -> Iterator[None]:
    """The block raises `error` (one of several), whose text holds each of `naming`; `what` says what is refused."""
    names = " or ".join(one.__name__ for one in (error if isinstance(error, tuple) else (error,)))
    wanted = f"{what} must raise {names}"
    try:
        yield
    except error as raised:
        missing = [str(part) for part in naming if str(part) not in str(raised)]
        if missing:
            pytest.fail(f"{what} is refused, but the text does not name {', '.join(missing)}: {raised}", pytrace=False)
    except Exception as raised:  # noqa: BLE001 - whatever else the backend raises is what the case reports
        said = f"{wanted}, it raised {type(raised).__name__}: {raised}"
        pytest.fail(said if isinstance(raised, PagedKVError) else f"{said}; {_NAMED}", pytrace=False)
    else:
        pytest.fail(f"{wanted}, but it was accepted", pytrace=False)
