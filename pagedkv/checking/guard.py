"""One instance under watch: who is inside it, whether it is closed or lost, and what it may raise."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

from pagedkv.api import AttentionBackend, ContractViolation, DeviceError, OutOfDeviceMemory, UnsupportedError
from pagedkv.checking.laws import CORE, broken

_T = TypeVar("_T")
Around = Callable[[str], AbstractContextManager[object]]
"""What the name of a call is given to, and what the call runs in."""


class Guard:
    """State that all objects of one checked instance share."""

    def __init__(self, backend: AttentionBackend, name: str, around: Around = nullcontext) -> None:
        self._around = around
        self.backend_name = f"backend {name!r}"
        self.closed = False
        self.capturing = 0
        self._backend = backend
        self._lost = False
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._inside = ""

    def core(self, law: str, what: str) -> ContractViolation:
        """The error for a law that the core broke."""
        return broken(law, CORE, what)

    def backend(self, law: str, what: str) -> ContractViolation:
        """The error for a law that the backend broke."""
        return broken(law, self.backend_name, what)

    @contextmanager
    def turn(self, call: str, *, closing: bool = False) -> Iterator[None]:
        """One call: refused after close, and while another thread is inside. A captured function calls from within."""
        if self._owner == threading.get_ident():
            yield
            return
        if not self._lock.acquire(blocking=False):
            raise self.core("one at a time", f"{call} was called while another thread was inside {self._inside}")
        self._owner, self._inside = threading.get_ident(), call
        try:
            if self.closed and not closing:
                raise self.core("use after close", f"{call} was called after close() of the backend")
            with self._around(call):
                yield
        finally:
            self._owner = None
            self._lock.release()

    def not_in_capture(self, call: str) -> None:
        """Refuse what a captured function must not do."""
        if self.capturing:
            raise self.core("capture", f"{call} was called by a function that is being captured")

    def ask(self, call: str, method: Callable[..., _T], /, *args: object, pure: bool = False, **names: object) -> _T:
        """What the backend answers. Any error is one that the contract knows, or becomes a violation.

        `pure` calls may go on working after a `DeviceError`.
        """
        try:
            result = method(*args, **names)
        except DeviceError:
            self._lost = True
            raise
        except Exception as error:
            if self._lost:
                raise self._not_sticky(f"{call} raised {type(error).__name__}") from error
            self._judge(call, error)
            raise
        if self._lost and not pure:
            raise self._not_sticky(f"{call} returned")
        return result

    def _judge(self, call: str, error: Exception) -> None:
        if isinstance(error, UnsupportedError | OutOfDeviceMemory):
            self._check_usable(call, error)
        elif not isinstance(error, ContractViolation):
            raise self.backend("errors", f"{call} raised {type(error).__name__}: {error}") from error

    def _not_sticky(self, what: str) -> ContractViolation:
        return self.backend("device error", f"{what} after an earlier call had raised DeviceError")

    def _check_usable(self, call: str, refusal: Exception) -> None:
        calls: list[Callable[[], object]] = [self._backend.capabilities, self._backend.memory]
        if not self.capturing:
            calls.append(self._backend.synchronize)
        for method in calls:
            try:
                method()
            except DeviceError:
                self._lost = True
                raise
            except Exception as error:
                what = f"after {call} had raised {type(refusal).__name__}, {method.__name__} raised {error!r}"
                raise self.backend("usable", what) from error
