"""A fresh interpreter that imports one plugin and probes it; run as a script, it answers with one line of JSON.

The kit's own process has long loaded what a descriptor must not, so only another one can tell.
"""

import contextlib
import importlib
import json
import os
import re
import stat
import sys
import time
from collections.abc import Iterator
from typing import Any

FRAMEWORKS = {"torch", "tensorflow", "jax", "jaxlib", "transformers", "mindspore", "paddle", "onnxruntime", "cupy"}
HARMLESS = {"/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/tty"}


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Import the target, probe twice, describe; what that loaded, opened and took."""
    sys.path[:] = asked["path"]
    for name in ("numpy", "pagedkv.api"):  # what any descriptor may import, so that it does not count
        importlib.import_module(name)
    import pagedkv.plugins  # noqa: F401 - the loader's own imports do not count either
    from pagedkv.api import Descriptor

    module, _, attribute = asked["target"].partition(":")
    before, variables, start = set(sys.modules), dict(os.environ), time.perf_counter()
    target = getattr(importlib.import_module(module), attribute)
    import_ms = 1e3 * (time.perf_counter() - start)
    lineage = (target if isinstance(target, type) else type(target)).__mro__
    extended = [cls.__module__ for cls in lineage if issubclass(cls, Descriptor)]
    imported = foreign(set(sys.modules) - before, [module, *extended])
    return {"import_ms": import_ms, "imported": imported, **probe(target, before), "environment": changed(variables)}


def probe(target: Any, before: set[str]) -> dict[str, Any]:
    """The devices of two probes, and what was opened and loaded on the way."""
    descriptor = target() if isinstance(target, type) else target
    opened, raised = set(devices()), ""
    indices: list[list[int]] = [[], []]
    listened = listen()
    start = time.perf_counter()
    try:
        found = descriptor.probe()
        probe_ms = 1e3 * (time.perf_counter() - start)
        indices = [[device.index for device in devices] for devices in (found, descriptor.probe())]
        for device in found:
            descriptor.describe(device)
    except BaseException as error:  # noqa: BLE001 - told to the parent, which judges
        raised, probe_ms = f"{type(error).__name__}: {error}", 1e3 * (time.perf_counter() - start)
    frameworks = sorted(FRAMEWORKS & (set(sys.modules) - before))
    seen = sorted((set(devices()) | set(listened)) - opened)
    return {"probe_ms": probe_ms, "indices": indices, "raised": raised, "devices": seen, "frameworks": frameworks}


def foreign(names: set[str], modules: list[str]) -> list[str]:
    """Those of the loaded modules that are neither the standard library's, the contract's, nor the plugin's own.

    `modules`: the descriptor's, and those of the descriptors that it extends; their packages are its own.
    """
    own = {package(module) for module in modules}
    parents = {one[: dot.start()] for one in own for dot in re.finditer(r"\.", one)}
    return sorted(
        name
        for name in names
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not name.startswith(("_sysconfigdata", "numpy."))
        and not any(name == mine or name.startswith(f"{mine}.") for mine in (*own, "pagedkv.api"))
        and name not in parents
    )


def package(module: str) -> str:
    """The top package of a descriptor's module, or the innermost one where it is inside of pagedkv."""
    top = module.partition(".")[0]
    return module.rpartition(".")[0] if top == "pagedkv" else top


def changed(variables: dict[str, str]) -> list[str]:
    """Names of environment variables that differ from `variables`."""
    return sorted(name for name in variables.keys() | os.environ.keys() if variables.get(name) != os.environ.get(name))


def listen() -> list[str]:
    """A list that grows by each device file that Python code opens from now on, even if it is closed again."""
    heard: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if is_device(path):
                heard.append(path)

    sys.addaudithook(hook)
    return heard


def devices() -> Iterator[str]:
    """Device files that this process has open or mapped; none where the system does not tell."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the folder's own descriptor is gone by now
                path = os.readlink(f"/proc/self/fd/{name}")
                if is_device(path):
                    yield path
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            yield from filter(is_device, {line.split(maxsplit=5)[-1].strip() for line in maps})


def is_device(path: str) -> bool:
    """Whether it is a device file that means something: no terminal, no source of zeros or random numbers."""
    if not path.startswith("/dev/") or path.startswith("/dev/pts/") or path in HARMLESS:
        return False
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(main(json.loads(sys.argv[1]))) + "\n")
