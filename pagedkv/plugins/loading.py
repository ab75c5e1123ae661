"""Loads one plugin into this process and checks it; what goes wrong ends as an error that names its distribution."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from pagedkv.api import API_VERSION, Capabilities, Descriptor, DeviceInfo
from pagedkv.api.errors import BackendError, BackendLoadError, BackendVersionError
from pagedkv.plugins.checks import (
    capability_problems,
    device_problems,
    is_tuple_of,
    is_version,
    missing_methods,
    option_problems,
    short,
)
from pagedkv.plugins.discovery import GROUP, Found, conflict_text
from pagedkv.plugins.requirements import unmet

_T = TypeVar("_T")


def load(found: Found) -> Descriptor:
    """Import one plugin and check its descriptor.

    Raises `BackendLoadError` (whatever the plugin raised, what it lacks, or two distributions with this name) and
    `BackendVersionError` (law G5).
    """
    return checked_descriptor(found, import_target(found))


def import_target(found: Found) -> Any:
    """What the entry point names, unchecked. Raises `BackendLoadError`, also for a plugin made for another torch."""
    if found.conflicts:
        raise BackendLoadError(conflict_text(found), distribution=found.distribution, version=found.version)
    if clash := next((u for u in unmet(found.distribution) if u.package == "torch" and u.installed), None):
        raise refusal(found, str(clash))
    from stevedore.driver import DriverManager

    entry = importlib.metadata.EntryPoint(name=found.name, value=found.target, group=GROUP)

    class OneEntryPoint(DriverManager[Any]):
        """Loads the entry point that was found here; stevedore's own listing is cached on disk and may be stale."""

        def list_entry_points(self) -> list[importlib.metadata.EntryPoint]:
            return [entry]

    with blamed(found, "importing"):
        return OneEntryPoint(GROUP, found.name).extensions[0].plugin


def checked_descriptor(found: Found, target: Any) -> Descriptor:
    """Check what the entry point names (a `Descriptor` class, or an instance), and make the instance."""
    with blamed(found, "reading its descriptor", passes=(BackendError,)):
        _check_version(found, target)
        problems = _descriptor_problems(found, target)
    if problems:
        raise refusal(found, f"its descriptor is not one: {'; '.join(problems)}")
    if not isinstance(target, type):
        return target  # type: ignore[no-any-return]
    with blamed(found, "making the descriptor"):
        return target()  # type: ignore[no-any-return]


def _check_version(found: Found, target: Any) -> None:
    """Law G5: equal majors, and `requires_api_minor` (default: the minor of `api`) at most the core's."""
    api = getattr(target, "api", None)
    if not is_version(api):
        return  # reported with whatever else the descriptor lacks
    major, minor = api
    needed = getattr(target, "requires_api_minor", None)
    needed = minor if needed is None else needed
    if type(needed) is not int or needed < 0:
        raise refusal(found, f"requires_api_minor is {short(needed)}, must be a whole number from 0 on, or None")
    if major != API_VERSION[0] or needed > API_VERSION[1]:
        core = "{}.{}".format(*API_VERSION)
        raise BackendVersionError(
            f"{found} is written for contract {major}.{minor} and needs at least {major}.{needed}; this pagedkv speaks "
            f"contract {core}; install a release of {found.distribution} for {core}, or a pagedkv for {major}.{needed}"
        )


def _descriptor_problems(found: Found, target: Any) -> list[str]:
    cls = target if isinstance(target, type) else type(target)
    name, api = getattr(target, "name", None), getattr(target, "api", None)
    problems = []
    if not issubclass(cls, Descriptor):
        problems.append(f"{found.target} is no subclass of pagedkv.api.Descriptor")
    if name != found.name or name != name.lower():
        problems.append(f"name is {name!r}, must be the entry point's {found.name!r}, in lower case")
    if not is_version(api):
        core = "{}.{}".format(*API_VERSION)
        problems.append(f"api is {api!r}, must be the contract's (major, minor); this pagedkv speaks {core}")
    problems += missing_methods(cls, ("probe", "describe", "create"))
    return problems + option_problems(getattr(target, "options", ()))


def probed(found: Found, descriptor: Descriptor, limit: float | None = None) -> tuple[DeviceInfo, ...]:
    """The descriptor's devices. Raises `BackendLoadError` when `probe` raises or returns something else.

    With a `limit` in seconds also when it takes longer; whatever it is then still doing goes on in a thread.
    """
    with blamed(found, "probing"):
        devices = descriptor.probe() if limit is None else _within(limit, descriptor.probe)
    if not is_tuple_of(devices, DeviceInfo):
        raise refusal(found, f"probe() returned {short(devices)}, must return a tuple of DeviceInfo")
    if problems := device_problems(devices):
        raise refusal(found, f"probe() returned a wrong device: {'; '.join(problems)}")
    return devices


def _within(limit: float, call: Callable[[], _T]) -> _T:
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            future.set_exception(error)

    threading.Thread(target=run, name="pagedkv-probe", daemon=True).start()
    if not wait((future,), limit).done:
        raise TimeoutError(f"no answer within {limit:g} s")
    return future.result()


def described(found: Found, descriptor: Descriptor, device: DeviceInfo) -> Capabilities:
    """What the device may do at most. Raises `BackendLoadError` when `describe` raises or returns something else."""
    with blamed(found, "describing its device"):
        capabilities = descriptor.describe(device)
    if not isinstance(capabilities, Capabilities):
        raise refusal(found, f"describe() returned {short(capabilities)}, must return Capabilities")
    if problems := capability_problems(capabilities):
        raise refusal(found, f"describe() returned wrong capabilities: {'; '.join(problems)}")
    return capabilities


@contextlib.contextmanager
def blamed(found: Found, doing: str, passes: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Turn whatever the plugin's code raises into its `BackendLoadError`; refuse it if it replaced a function of ours.

    SystemExit and AssertionError included; only KeyboardInterrupt passes, and the types in `passes`.
    """
    allowed: tuple[type[BaseException], ...] = (KeyboardInterrupt, *passes)
    with untouched(found, doing):
        try:
            yield
        except allowed:
            raise
        except BaseException as error:
            raise refusal(found, f"{doing} raised {type(error).__name__}: {short(error, str)}", error) from error


@contextlib.contextmanager
def untouched(found: Found, doing: str) -> Iterator[None]:
    """Refuse a plugin that replaced one of our public functions meanwhile, and put the function back. Takes 2 ms."""
    with Watch(found).over(doing):
        yield


class Watch:
    """Our public functions as they are, for calls that are watched one by one; a watched call takes 0.6 ms longer."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self._before = _public_functions()

    @contextlib.contextmanager
    def over(self, doing: str) -> Iterator[None]:
        """`untouched` for one call. What somebody else replaced before it is not the plugin's doing."""
        if _replaced(self._before):
            self._before = _public_functions()
        try:
            yield
        finally:
            replaced = _replaced(self._before)
            for owner, name, value in replaced.values():
                setattr(owner, name, value)
        if replaced:
            names = ", ".join(replaced)
            raise refusal(self._found, f"{doing} replaced {names}, which belongs to pagedkv (it has been put back)")


def refusal(found: Found, what: str, cause: BaseException | None = None) -> BackendLoadError:
    """The error for a plugin that is broken, with what to do about it."""
    ours = "install pagedkv again (pip install . in the clone)"
    theirs = f"update it (pip install -U {found.distribution}) or remove it (pip uninstall {found.distribution})"
    return BackendLoadError(
        f"{found} cannot be used: {what}; {ours if found.distribution == 'pagedkv' else theirs}",
        distribution=found.distribution,
        version=found.version,
        cause=cause,
    )


def _public_functions() -> dict[tuple[str, str, str], tuple[Any, Any]]:
    """(module, class or "", name) -> (owner, value) of the callables of every module of ours that is loaded."""
    functions = {}
    for module_name, module in list(sys.modules.items()):
        if module_name != "pagedkv" and not module_name.startswith("pagedkv."):
            continue
        for name, value in list(vars(module).items()):
            if name.startswith("_") or not callable(value):
                continue
            functions[module_name, "", name] = (module, value)
            if isinstance(value, type) and value.__module__ == module_name:
                functions.update(_methods(module_name, value))
    return functions


def _methods(module_name: str, cls: type) -> dict[tuple[str, str, str], tuple[Any, Any]]:
    kinds = (types.FunctionType, classmethod, staticmethod, property)
    return {(module_name, cls.__name__, n): (cls, v) for n, v in vars(cls).items() if isinstance(v, kinds)}


def _replaced(before: Mapping[tuple[str, str, str], tuple[Any, Any]]) -> dict[str, tuple[Any, str, Any]]:
    """Dotted name -> (owner, name, value before) of what differs from `before`."""
    return {
        ".".join(filter(None, key)): (owner, key[2], value)
        for key, (owner, value) in before.items()
        if vars(owner).get(key[2]) is not value
    }
