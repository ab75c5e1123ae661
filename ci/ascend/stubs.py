"""Stand-ins for the libraries of CANN, so that torch-npu's wheel can be imported where there is none.

    stubs.py WHEEL_FOLDER LIBRARIES

Every function that the wheel's libraries want and nobody here has is one that fails, with the error of a device that
was never set: nothing can be computed, so nothing can be faked.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

FAILS = 107000
"""ACL's error for a bad argument."""
POINTERS = (
    "aclCreateDataBuffer",
    "aclCreateTensorDesc",
    "aclGetRecentErrMsg",
    "aclopCreateAttr",
    "aclrtGetSocName",
)
"""Functions that return a pointer, which is null."""
LIBRARIES = (
    "libhccl.so",
    "libascendcl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libatb.so",
)
"""Names that the wheel's libraries look for."""
SYSTEM = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libdl.so.2", "libpthread.so.0")


def symbols(libraries: Iterable[Path], kind: str) -> set[str]:
    """Dynamic symbols without their versions. `kind`: undefined or defined."""
    command = ["nm", "-D", "-P", f"--{kind}-only", *map(str, libraries)]
    lines = (line.split() for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines())
    weak = ("w", "v") if kind == "undefined" else ()
    return {words[0].split("@")[0] for words in lines if len(words) > 1 and words[1] not in weak}


def torch_libraries() -> Iterable[Path]:
    """Those of the torch that is installed, which takes seconds to import and is not."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torch")
    return Path(spec.origin).with_name("lib").glob("*.so*")


def system_libraries() -> Iterator[Path]:
    """The compiler's and the C library's own, and the loader."""
    for name in SYSTEM:
        said = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        yield Path(said.stdout.strip())
    yield from (path for folder in ("/lib64", "/lib") for path in Path(folder).glob("ld-linux-*.so.*"))


def missing(wheel: Path) -> list[str]:
    """What the wheel's libraries want of CANN."""
    own = sorted(wheel.glob("torch_npu/**/*.so"))
    there = [*own, *torch_libraries(), *system_libraries()]
    wanted = symbols(own, "undefined") - symbols(there, "defined")
    return sorted(name for name in wanted if not name.startswith(("Py", "_Py")))


def source(names: Iterable[str]) -> Iterator[str]:
    """C that defines them."""
    for number, name in enumerate(names):
        if name.startswith(("_ZTV", "_ZTI", "_ZTS")):
            yield f'void *s{number}[64] __asm__("{name}");\n'
        else:
            value = 0 if name in POINTERS else FAILS
            yield f'long s{number}(void) __asm__("{name}"); long s{number}(void) {{ return {value}; }}\n'


def build(wheel: Path, folder: Path) -> int:
    """Compile them into one library that goes by every name; how many functions it has."""
    names = missing(wheel)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stubs.c").write_text("".join(source(names)))
    library = folder / "libstubs.so"
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", "-o", str(library), str(folder / "stubs.c")], check=True)
    for name in LIBRARIES:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(library.name)
    return len(names)


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), Path(sys.argv[2])))
