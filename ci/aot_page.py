"""The page of figures about the kernels for CUDA, from the JSON of `aot.py` and of the interpreter's tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

INTRODUCTION = """# The kernels for CUDA: compiled and interpreted

`make cuda-kernels` writes this page on any machine, with no device. **Nothing on it was run on hardware**: kernels were
compiled ahead of time for each target by Triton's own compiler and `ptxas`, and run under Triton's interpreter beside
attention in float64. `make aot` compiles all of them and fails where one spills, takes more shared memory than its
target has, or lacks the instructions that it was written for; `make interpret-all` runs the interpreter's tests under
Triton 3.6.0, 3.7.1 and 3.9.0, and compiles a sample under each.
"""

READING = """## How to read the tables

*few* is the kernel for few queries a row (decode: keys in splits, then a merge), *many* the one for prompts; 32 query
heads over 8 KV heads. *features*: window, softcap, sinks, ALiBi and the logarithms of the softmax at once; *splits*:
results left for a merge. A tile is queries x keys, then warps and stages. Registers are those of a thread. Instructions
are counted in the machine code, a loop's once: HMMA products of matrices by one warp, HGMMA by four (9.0), UTCHMMA by
the tensor core's own thread (10.0), LDGSTS copies to shared memory that run ahead (cp.async), UTMALDG loads by
descriptor (TMA), STS stores to shared memory, FFMA scalar products (all that float32 has).
"""

BOXES = """## Descriptors

From 9.0 on keys and values can come by tensor descriptor (TMA): one instruction brings a box of rows. A box lies
within one block, so a step over 64 keys out of blocks of 16 needs four boxes of each. Three ways were compiled for 9.0,
bfloat16, head dim 128, blocks of 16, Triton 3.9.0:

| way | kernel | registers | HMMA or HGMMA | STS | shared memory |
| --- | --- | --- | --- | --- | --- |
| pointers | few | 121 | 32 | 4 | 39,168 |
| boxes put together to 64 keys (`join`, `reshape`) | few | 128 | 32 | 132 | 55,412 |
| **each box a product of its own** | few | 95 | 48 | 18 | 41,652 |
| **pointers** | many | 202 | 12 | 16 | 98,560 |
| boxes put together | many | 211 | 12 | 80 | 82,036 |
| each box a product of its own | many | 185 | 36 | 20 | 86,196 |

Put together, the keys pass through registers and back to shared memory: 64 to 128 more stores a step. As products of
their own they do not, and decode, which waits for memory, gets by with fewer registers: so few queries take descriptors
from blocks of 16 on. For many queries the products become three times as many, each a quarter as wide, where a product
of four warps wants 64 keys: they take pointers (cp.async) below blocks of 64. `Choice(descriptors=...)` overrules both;
which is faster is for a day with a card to say.
"""

ERRORS = """
The largest of all cases, against float64: of one entry, and of the whole result (norm of the difference over the norm).
*rounded*: float64's own result rounded to the dtype, what no kernel can be below. bfloat16 with the interpreter's
arithmetic repaired; a quantized cache is read as exact.
"""

COUNTS = ("HMMA", "HGMMA", "UTCHMMA", "LDGSTS", "UTMALDG", "STS", "FFMA", "MFMA")


def label(target: int | str) -> str:
    return f"sm_{target}" if isinstance(target, int) else target


def page(files: list[dict[str, Any]]) -> str:
    """Markdown. `files`: what `aot.py --json` wrote, once or for several targets, and what KERNEL_ERRORS was given."""
    parts = [INTRODUCTION]
    for file in files:
        parts += [overview(file)] if "kernels" in file else [errors(file)]
    parts += [BOXES, READING]
    for file in files:
        parts += details(file["kernels"]) if "kernels" in file else []
    return "\n".join(parts)


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    names = list(head)
    lines = [names, ["---"] * len(names), *rows]
    return "".join("| " + " | ".join(str(cell) for cell in line) + " |\n" for line in lines)


def by_target(kernels: list[dict[str, Any]]) -> dict[int | str, list[dict[str, Any]]]:
    found: dict[int | str, list[dict[str, Any]]] = {}
    for kernel in kernels:
        found.setdefault(kernel["target"], []).append(kernel)
    return found


def overview(file: dict[str, Any]) -> str:
    """One line a target."""
    kernels = file["kernels"]
    cuda = all(isinstance(kernel["target"], int) for kernel in kernels)
    rows = (
        (
            label(target),
            len(of),
            max(kernel["registers"] for kernel in of),
            sum(kernel["spills"] > 0 for kernel in of),
            f"{max(kernel['shared'] for kernel in of):,}",
            ", ".join(name for name in COUNTS if any(kernel["instructions"].get(name) for kernel in of)),
        )
        for target, of in by_target(kernels).items()
    )
    head = ("target", "kernels", "most registers", "kernels that spill", "most shared memory", "instructions")
    said = (
        f"## Compiled by Triton {file['triton']}\n\n{len(kernels)} kernels in {file['seconds']} s by {file['jobs']} "
        "processes (nothing where Triton's cache had them).\n\n"
        if cuda
        else "## Another maker's device\n\nA bonus check with tiles of 8.0: it compiles, no more.\n\n"
    )
    return said + table(head, rows)


def errors(file: dict[str, Any]) -> str:
    """Errors by kernel and dtype."""
    rows = (
        (
            row["kernel"], row["dtype"], row["cache"] if "attention" in row["kernel"] else "", row["cases"],
            *(f"{row[name]:.1e}" for name in ("max_abs", "frobenius", "floor_max_abs", "floor_frobenius")),
        )
        for row in file["errors"]
    )  # fmt: skip
    head = ("kernel", "dtype", "cache", "cases", "largest error", "relative", "largest, rounded", "relative, rounded")
    return f"## Errors under the interpreter of Triton {file['triton']}\n{ERRORS}\n" + table(head, rows)


def details(kernels: list[dict[str, Any]]) -> Iterator[str]:
    """A table for each target."""
    for target, of in by_target(kernels).items():
        counted = [name for name in COUNTS if any(kernel["instructions"].get(name) for kernel in of)]
        head = ("kernel", "tile", "registers", "spilled", "shared memory", *counted)
        yield f"## {label(target)}\n\n" + table(head, (detail(kernel, counted) for kernel in of))


def detail(kernel: dict[str, Any], counted: list[str]) -> list[object]:
    height, width, warps, stages = kernel["tile"] or (0, 0, 0, 0)
    tile = f"{height} x {width}, {warps}, {stages}" if kernel["tile"] else ""
    name = kernel["name"] if kernel["kernel"] == "attend_tile" else named(kernel)
    counts = [kernel["instructions"].get(count, "") for count in counted]
    return [name, tile, kernel["registers"], kernel["spills"], f"{kernel['shared']:,}", *counts]


def named(kernel: dict[str, Any]) -> str:
    return f"merge of {kernel['name']}" if kernel["kernel"] == "merge_splits" else kernel["name"]
