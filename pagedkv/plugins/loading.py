"""Loads one plugin into this process and checks it; what goes wrong ends as an error that names its distribution."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeGuard

from pagedkv.api import API_VERSION, Capabilities, Descriptor, DeviceInfo, Option
from pagedkv.api.errors import BackendLoadError, BackendVersionError
from pagedkv.plugins.discovery import GROUP, Found, conflict_text


def load(found: Found) -> Descriptor:
    """Import one plugin and check its descriptor.

    Raises `BackendLoadError` (whatever the plugin raised, what it lacks, or two distributions with this name) and
    `BackendVersionError` (law G5).
    """
    return checked_descriptor(found, import_target(found))


def import_target(found: Found) -> Any:
    """What the entry point names, unchecked. Raises `BackendLoadError`."""
    if found.conflicts:
        raise BackendLoadError(conflict_text(found), distribution=found.distribution, version=found.version)
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
    if major != API_VERSION[0] or needed > API_VERSION[1]:
        core = "{}.{}".format(*API_VERSION)
        raise BackendVersionError(
            f"{found} is written for contract {major}.{minor} and needs at least {major}.{needed}; this pagedkv speaks "
            f"contract {core}; install a release of {found.distribution} for {core}, or a pagedkv for {major}.{needed}"
        )


def is_version(api: Any) -> TypeGuard[tuple[int, int]]:
    """Whether it is a (major, minor) pair."""
    return isinstance(api, tuple) and len(api) == 2 and all(type(part) is int for part in api)


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
    options = getattr(target, "options", ())
    if not _is_tuple_of(options, Option):
        problems.append(f"options is {short(options)}, must be a tuple of Option")
    return problems


def missing_methods(cls: type, methods: Iterable[str]) -> list[str]:
    """One clause for each of `methods` that the class does not implement."""
    abstract: frozenset[str] = getattr(cls, "__abstractmethods__", frozenset())
    return [f"method {m} is missing" for m in methods if m in abstract or not callable(getattr(cls, m, None))]


def _is_tuple_of(value: Any, cls: type) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, cls) for item in value)


def probed(found: Found, descriptor: Descriptor) -> tuple[DeviceInfo, ...]:
    """The descriptor's devices. Raises `BackendLoadError` when `probe` raises or returns something else."""
    with blamed(found, "probing"):
        devices = descriptor.probe()
    if not _is_tuple_of(devices, DeviceInfo):
        raise refusal(found, f"probe() returned {short(devices)}, must return a tuple of DeviceInfo")
    problems = [problem for device in devices for problem in _device_problems(device)]
    if problems:
        raise refusal(found, f"probe() returned a wrong device: {'; '.join(problems)}")
    return devices


def _device_problems(device: DeviceInfo) -> list[str]:
    def is_bytes(value: Any) -> bool:
        return value is None or (type(value) is int and value >= 0)

    checks = {
        "index": type(device.index) is int and device.index >= 0,
        "kind": isinstance(device.kind, str),
        "total": is_bytes(device.total),
        "free": is_bytes(device.free),
        "unified": isinstance(device.unified, bool),
        "score": type(device.score) is int and device.score >= 0,
        "reason": isinstance(device.reason, str),
    }
    return [f"{name} is {short(getattr(device, name))}" for name, fine in checks.items() if not fine]


def described(found: Found, descriptor: Descriptor, device: DeviceInfo) -> Capabilities:
    """What the device may do at most. Raises `BackendLoadError` when `describe` raises or returns something else."""
    with blamed(found, "describing its device"):
        capabilities = descriptor.describe(device)
    if not isinstance(capabilities, Capabilities):
        raise refusal(found, f"describe() returned {short(capabilities)}, must return Capabilities")
    return capabilities


@contextlib.contextmanager
def blamed(found: Found, doing: str, passes: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Turn whatever the plugin's code raises into its `BackendLoadError`; refuse it if it replaced a function of ours.

    SystemExit and AssertionError included; only KeyboardInterrupt passes, and the types in `passes`.
    """
    allowed: tuple[type[BaseException], ...] = (KeyboardInterrupt, *passes)
    before = _public_functions()
    try:
        yield
    except allowed:
        raise
    except BaseException as error:
        raise refusal(found, f"{doing} raised {type(error).__name__}: {short(error, str)}", error) from error
    finally:
        replaced = _restore(before)
    if replaced:
        raise refusal(found, f"{doing} replaced {', '.join(replaced)}, which belongs to pagedkv (it has been put back)")


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


def short(value: Any, to_text: Callable[[Any], str] = repr) -> str:
    """At most a few hundred characters of a plugin's value on one line, with a mark where it was cut."""
    text = " ".join(to_text(value).split())
    return text if len(text) <= 400 else f"{text[:400]}... ({len(text)} characters)"


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


def _restore(before: Mapping[tuple[str, str, str], tuple[Any, Any]]) -> list[str]:
    """Put back what differs from `before`; the dotted names of what did."""
    replaced = []
    for key, (owner, value) in before.items():
        if vars(owner).get(key[2]) is not value:
            setattr(owner, key[2], value)
            replaced.append(".".join(filter(None, key)))
    return replaced
