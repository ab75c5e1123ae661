"""Every error pagedkv raises, as one tree.

    PagedKVError
    ├── ConfigError            a setting is wrong, unknown or contradicts another
    ├── ModelError             a model file is missing, damaged, hostile or of an unknown kind
    ├── BackendError
    │   ├── BackendNotFound    no installed backend has that name
    │   ├── BackendLoadError   the plugin raised while loading
    │   ├── BackendVersionError  plugin and core speak different contract versions
    │   ├── BackendUnavailable   the plugin is fine, its device or library is not there
    │   ├── UnsupportedError   the backend does not do what was asked (all reasons)
    │   └── ContractViolation  a law of the contract was broken (which one)
    ├── OutOfDeviceMemory      (requested, free)
    ├── DeviceError            the device failed; the instance is lost
    ├── EngineDead             the engine stopped after a DeviceError or an InternalError
    ├── InternalError          an invariant of the core broke: a bug of ours, please report it
    └── RequestError
        ├── RequestInvalid     one field of one request is wrong
        ├── RequestTooLong     it can never fit (needed, available)
        └── RequestAborted

Messages say what to do next; attributes carry the values for programs.
"""

from __future__ import annotations

from collections.abc import Sequence


class PagedKVError(Exception):
    """Base of every error that pagedkv raises on purpose."""


class ConfigError(PagedKVError):
    """A setting is wrong, unknown, not built yet, or contradicts another one."""


class ModelError(PagedKVError):
    """A model's files are missing, damaged, hostile, or of a kind pagedkv cannot run."""


class BackendError(PagedKVError):
    """Base of everything that can be wrong with a backend plugin."""


class BackendNotFound(BackendError):
    """No installed distribution offers a backend of this name."""

    def __init__(self, message: str, *, name: str = "", known: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.name = name
        self.known = tuple(known)


class BackendLoadError(BackendError):
    """A plugin raised while it was loaded; `distribution`, `version` and `cause` say whose fault."""

    def __init__(
        self,
        message: str,
        *,
        distribution: str | None = None,
        version: str | None = None,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(message)
        self.distribution = distribution
        self.version = version
        self.cause = cause


class BackendVersionError(BackendError):
    """Plugin and core speak different versions of the contract; both stand in the message."""


class BackendUnavailable(BackendError):
    """The plugin loads, but its device, driver or library is not there."""


class UnsupportedError(BackendError):
    """The backend does not do what was asked. `reasons` holds every reason, not just the first."""

    def __init__(self, reasons: str | Sequence[str]) -> None:
        self.reasons = (reasons,) if isinstance(reasons, str) else tuple(reasons)
        super().__init__("; ".join(self.reasons))


class ContractViolation(BackendError):
    """A law of the contract was broken; `law` names it."""

    def __init__(self, message: str, *, law: str = "") -> None:
        super().__init__(message)
        self.law = law


class OutOfDeviceMemory(PagedKVError):
    """An allocation did not fit. `requested` and `free` are bytes; None is unknown."""

    def __init__(self, message: str = "", *, requested: int | None = None, free: int | None = None) -> None:
        super().__init__(message or f"out of device memory: {requested} bytes requested, {free} bytes free")
        self.requested = requested
        self.free = free


class DeviceError(PagedKVError):
    """The device failed. After it, every call of the instance but `close` raises it again."""


class EngineDead(PagedKVError):
    """The engine stopped; every open request has failed. Make a new one."""


class InternalError(PagedKVError):
    """An invariant of the core broke: never the user's fault, always worth a report."""


class RequestError(PagedKVError):
    """Base of what concerns one request and leaves the engine and its neighbours running."""


class RequestInvalid(RequestError):
    """One field of a request is wrong; `field` names it."""

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class RequestTooLong(RequestError):
    """The request can never fit. `needed` and `available` count tokens."""

    def __init__(self, message: str, *, needed: int = 0, available: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class RequestAborted(RequestError):
    """The request was aborted before it finished."""
