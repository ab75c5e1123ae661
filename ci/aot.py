"""Compiles the kernels for CUDA ahead of time, with no device: registers, spills, shared memory, instructions.

    python ci/aot.py [--targets 80,90] [--only PATTERN] [--sample] [--jobs N] [--json FILE]
    python ci/aot.py --targets gfx942                       no target of ours: compiles, no more
    python ci/aot.py --markdown FILE.json... > docs/cuda-kernels.md

Every launcher is called as the backend would call it, with small tensors in host memory and a driver that only knows
its target; the launch is caught and what it would have compiled is compiled: same signature, same alignment, same
constants. Shapes of the sample are a few of each kernel, for every run of CI. Exit status 1: a kernel spills, takes
more shared memory than its target has or than the choice of tiles reckoned with, or lacks the instructions that it was
written for.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "backends"))
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch  # noqa: E402
import triton  # noqa: E402
from aot_page import label, page  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.driver import DriverBase  # noqa: E402
from triton.runtime import driver  # noqa: E402

from pagedkv_cuda.kernels import ops, sampling  # noqa: E402
from pagedkv_cuda.kernels.append import append  # noqa: E402
from pagedkv_cuda.kernels.arguments import Cache, Layer, Rows  # noqa: E402
from pagedkv_cuda.kernels.attention import Choice, attend, scratch_floats  # noqa: E402
from pagedkv_cuda.kernels.tiles import DESCRIPTOR_TARGET, SHARED_LIMIT, Tile, shared_bytes  # noqa: E402

TARGETS = (80, 86, 87, 89, 90, 100, 120)
OTHERS = {"gfx942": GPUTarget("hip", "gfx942", 64)}
"""Compiled on request, with tiles of 8.0: nothing of ours runs there."""
FEATURES: dict[str, Any] = {"window": 100, "softcap": 30.0, "sinks": torch.zeros(32), "alibi": torch.zeros(32)}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
COUNTED = ("HMMA", "HGMMA", "UTCHMMA", "UTCQMMA", "LDGSTS", "UTMALDG", "STS", "FFMA")
Launch = Callable[[int], None]


class Offline(DriverBase):
    """A device that has a compute capability and nothing else."""

    capability = 80

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # launchers keep what they know of a device by its number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing runs here")


# -- what is shipped ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One specialisation of attention."""

    kernel: str
    dtype: torch.dtype = torch.bfloat16
    stored: torch.dtype | None = None
    dim: int = 128
    block_size: int = 16
    features: bool = False
    splits: bool = False
    scales: str = "token"
    descriptors: bool = False

    @property
    def name(self) -> str:
        words = [self.kernel, str(self.dtype)[6:], f"dim {self.dim}", f"block {self.block_size}"]
        words += [f"cache {str(self.stored)[6:]}"] * (self.stored is not None)
        return ", ".join([*words, *[w for w in ("features", "splits", "descriptors") if getattr(self, w)]])

    def launch(self, target: int) -> None:
        """32 query heads over 8 KV heads; one row of few queries, or two rows of many."""
        kv, stored, few = 8, self.stored or self.dtype, self.kernel == "few"
        held = [torch.zeros((4, kv, self.block_size, self.dim), dtype=stored) for _ in "kv"]
        scales = [torch.ones((4, kv, self.block_size)) if self.stored is not None else None for _ in "kv"]
        cache = Cache(keys=held[0], values=held[1], k_scale=scales[0], v_scale=scales[1])
        layer = Layer(q_heads=32, kv_heads=kv, scale=0.1, **(FEATURES if self.features else {}))
        ints = torch.zeros(16, dtype=torch.int32)
        rows = Rows(
            cu_q=ints, ctx_len=ints, block_table=ints.view(4, 4), rows=ints, num_seqs=2, num_tokens=64, max_ctx=1024,
            num_decode=2 if few else 0,
        )  # fmt: skip
        q = torch.zeros((64, 32, self.dim), dtype=self.dtype)
        choice = Choice(span=64 if self.splits else 1024, descriptors=self.descriptors)
        lse = torch.zeros((64, 32)) if self.features else None
        scratch = torch.zeros(scratch_floats(32, self.dim, 2))
        attend(q, torch.empty_like(q), cache, layer, rows, scratch, lse, target=target, choice=choice)


def shapes(target: int) -> Iterator[Shape]:
    """Every tile of the table plain and with all features, every format of a cache, descriptors and pointers."""
    tma = target >= DESCRIPTOR_TARGET
    for kernel in ("few", "many"):
        boxes = tma and kernel == "few"  # what is used for blocks of 16
        for dim in (64, 128, 256):
            for features in (False, True):
                yield Shape(kernel=kernel, dim=dim, features=features, splits=kernel == "few", descriptors=boxes)
            for stored in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
                yield Shape(kernel=kernel, dim=dim, stored=stored, descriptors=boxes)
            yield Shape(kernel=kernel, dim=dim, dtype=torch.float32, features=dim == 128)
            if tma:
                yield Shape(kernel=kernel, dim=dim, block_size=64, descriptors=True)
        yield Shape(kernel=kernel, dim=80, dtype=torch.float16, block_size=48)
        yield Shape(kernel=kernel, features=True, block_size=48)
        yield Shape(kernel=kernel, stored=torch.float8_e4m3fn, features=True, block_size=48)
        if tma:
            yield Shape(kernel=kernel, block_size=256, descriptors=True, stored=torch.float8_e4m3fn, features=True)
    if tma:
        yield Shape(kernel="few", block_size=32, descriptors=True)
        yield Shape(kernel="many", block_size=16, descriptors=True)


def few_and_many(target: int) -> Iterator[Shape]:
    """The sample: both kernels, one quantized cache, descriptors."""
    yield Shape(kernel="few", features=True, splits=True)
    yield Shape(kernel="many", features=True)
    yield Shape(kernel="few", stored=torch.float8_e4m3fn)
    if target >= DESCRIPTOR_TARGET:
        yield Shape(kernel="few", block_size=16, descriptors=True)
        yield Shape(kernel="many", block_size=64, descriptors=True)


def appends() -> Iterator[tuple[str, Launch]]:
    for stored in (torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):

        def launch(target: int, stored: torch.dtype = stored) -> None:
            held = [torch.zeros((4, 8, 16, 128), dtype=stored) for _ in "kv"]
            scales = [torch.ones((4, 8, 16)) if stored != torch.bfloat16 else None for _ in "kv"]
            k = torch.zeros((16, 8, 128), dtype=torch.bfloat16)
            cache = Cache(keys=held[0], values=held[1], k_scale=scales[0], v_scale=scales[1])
            append(k, k, cache, torch.zeros(16, dtype=torch.int64))

        yield f"append, cache {str(stored)[6:]}", launch


def fused() -> Iterator[tuple[str, Launch]]:
    x = torch.zeros((16, 4096), dtype=torch.bfloat16)
    heads, angles = x.view(16, 32, 128), torch.zeros((16, 64))
    logits, ones = torch.zeros((16, 128_256)), torch.ones(16)
    yield "rms_norm", lambda target: void(ops.rms_norm(x, x[0], 1e-5))
    yield "add_rms_norm", lambda target: void(ops.add_rms_norm(x, x, x[0], 1e-5))
    yield "rope", lambda target: ops.rope(heads, heads[:, :8], angles, angles)
    yield "silu_mul", lambda target: void(ops.silu_mul(x))
    yield "gelu_tanh_mul", lambda target: void(ops.gelu_tanh_mul(x))
    yield "greedy", lambda target: void(sampling.greedy(logits))
    yield "sample", lambda target: void(sampling.sample(logits, ones, ones, ones.int(), ones, target=target))


def void(_: object) -> None:
    """A launch's result is of no use where nothing ran."""


def catalogue(target: int, sample: bool) -> Iterator[tuple[str, Launch]]:
    yield from ((shape.name, shape.launch) for shape in (few_and_many if sample else shapes)(target))
    yield from appends()
    yield from fused()


# -- compiling ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Report:
    """One kernel on one target. `shared` in bytes, `spills` in bytes of stack, `tile` as in tiles.json."""

    target: int | str
    name: str
    kernel: str
    tile: list[int] | None = None
    registers: int = 0
    spills: int = 0
    shared: int = 0
    seconds: float = 0.0
    instructions: dict[str, int] = dataclasses.field(default_factory=dict)
    faults: list[str] = dataclasses.field(default_factory=list)


def caught(launch: Launch, target: int) -> list[dict[str, Any]]:
    """What the launches would have compiled."""
    found: list[dict[str, Any]] = []

    def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found.append(compile | {"fn": fn.jit_function})
        return True  # taken care of: nothing is launched

    knobs.runtime.jit_cache_hook = hook
    Offline.capability = target
    launch(target)
    return found


def compiled(target: int | str, name: str, what: dict[str, Any]) -> Report:
    source = triton.compiler.ASTSource(what["fn"], what["signature"], what["constants"], what["configs"][0])
    report = Report(target=target, name=name, kernel=what["fn"].__name__, tile=tile_of(what))
    options = {"num_warps": what["num_warps"], "num_stages": what["num_stages"]}
    began = time.perf_counter()
    try:
        built = triton.compile(source, target=gpu(target), options=options)
    except (triton.errors.TritonError, RuntimeError) as error:
        report.faults.append(f"does not compile: {root(error)}")
        return report
    report.seconds = round(time.perf_counter() - began, 2)
    report.shared = built.metadata.shared
    if isinstance(target, str):
        inspect_amd(built.asm["amdgcn"], report)
    else:
        inspect(built.asm["cubin"], report)
        report.faults += list(faults(report, target, constants(what)))
    return report


def gpu(target: int | str) -> GPUTarget:
    return OTHERS[target] if isinstance(target, str) else GPUTarget("cuda", target, 32)


def constants(what: dict[str, Any]) -> dict[str, Any]:
    """The constants of a launch by name."""
    return {what["fn"].arg_names[index]: value for (index,), value in what["constants"].items()}


def tile_of(what: dict[str, Any]) -> list[int] | None:
    given = constants(what)
    if "BLOCK_M" not in given:
        return None
    return [given["BLOCK_M"], given["BLOCK_N"], what["num_warps"], what["num_stages"]]


def root(error: BaseException) -> str:
    """The last lines of the first cause: the place in the innermost function, and what is wrong there."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " | ".join(str(error).splitlines()[-4:])


def inspect(cubin: bytes, report: Report) -> None:
    """Registers and spills, and how many of the instructions that matter."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = output(TOOLS / "cuobjdump", "-res-usage", file.name)
        code = output(TOOLS / "nvdisasm", "-c", file.name)
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    report.registers, report.spills = int(numbers["REG"]), int(numbers["STACK"])
    counts = collections.Counter(re.findall(r"\b(" + "|".join(COUNTED) + r")\b", code))
    report.instructions = dict(sorted(counts.items()))


def inspect_amd(code: str, report: Report) -> None:
    """The same from the assembler's text: vector registers, both kinds of spills, products of matrices."""
    numbers = {name: int(number) for name, number in re.findall(r"\.(\w+_count): *(\d+)", code)}
    report.registers = numbers["vgpr_count"]
    report.spills = 4 * numbers["vgpr_spill_count"]
    report.instructions = {"MFMA": len(re.findall(r"\bv_mfma\w*", code))}


def faults(report: Report, target: int, given: dict[str, Any]) -> Iterator[str]:
    limit = SHARED_LIMIT[target] * 1024
    if report.spills:
        yield f"spills {report.spills} bytes"
    if report.shared > limit:
        yield f"takes {report.shared} bytes of shared memory, {target} has {limit}"
    if report.kernel == "attend_tile":
        reckoned = shared_bytes(Tile(*report.tile or ()), target, itemsize(report), max(given["DK"], given["DV"]))
        if report.shared > reckoned:
            yield f"takes {report.shared} bytes of shared memory where the choice of tiles reckons with {reckoned}"
        for group in expected(report, target, given):
            if not any(name in report.instructions for name in group):
                yield f"has none of {', '.join(group)}"


def itemsize(report: Report) -> int:
    """The bytes that the table of tiles counts a shape under."""
    return 4 if "float32" in report.name else 1 if "cache" in report.name else 2


def expected(report: Report, target: int, given: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Groups of instructions, of each of which a tile of attention should have one."""
    tall = not given["UNIFORM"]
    if "float32" not in report.name:
        yield {90: ("HGMMA",), 100: ("UTCHMMA",)}.get(target, ("HMMA",)) if tall else ("HMMA",)
    if given["DESCRIPTORS"]:
        yield ("UTMALDG",)
    elif target < DESCRIPTOR_TARGET and report.tile and report.tile[3] > 1:
        yield ("LDGSTS",)  # cp.async: loads that run ahead


def output(*command: object) -> str:
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout


def reports(target: int | str, only: str, sample: bool) -> Iterator[Report]:
    """Every kernel of one target."""
    driver.set_active(Offline())
    seen = set()
    tiles = target if isinstance(target, int) else Offline.capability
    for name, launch in catalogue(tiles, sample):
        if not re.search(only, name):
            continue
        for what in caught(launch, tiles):
            key = (what["fn"].__name__, what["specialization_data"])
            if key not in seen:
                seen.add(key)
                yield compiled(target, name, what)


def listed(target: int | str, only: str, sample: bool) -> list[Report]:
    return list(reports(target, only, sample))


def all_reports(targets: list[int | str], jobs: int, only: str, sample: bool) -> Iterator[Report]:
    """One by one, or a target at a time as processes finish; the last targets have most kernels and begin first."""
    if jobs == 1:
        for target in targets:
            yield from reports(target, only, sample)
        return
    work = functools.partial(listed, only=only, sample=sample)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, context) as pool:
        for done in concurrent.futures.as_completed([pool.submit(work, target) for target in reversed(targets)]):
            yield from done.result()


def spoken(report: Report) -> str:
    counts = " ".join(f"{name} {count}" for name, count in report.instructions.items())
    return (
        f"{label(report.target):6} {report.kernel:13} {report.name:60} {report.registers:3} registers "
        f"{report.spills:4} spilled {report.shared:6} shared {report.seconds:5.1f} s  {counts}  "
        + "; ".join(report.faults)
    )


def main() -> int:
    given = arguments()
    if given.markdown:
        print(page([json.loads(path.read_text("utf-8")) for path in given.markdown]), end="")
        return 0
    began = time.perf_counter()
    rows: list[Report] = []
    for report in all_reports(given.targets, given.jobs, given.only, given.sample):
        print(spoken(report), flush=True)
        rows.append(report)
    rows.sort(key=lambda report: given.targets.index(report.target))
    wrong = sum(bool(report.faults) for report in rows if isinstance(report.target, int))
    seconds = round(time.perf_counter() - began)
    if given.json:
        written = {"triton": triton.__version__, "seconds": seconds, "jobs": given.jobs}
        written["kernels"] = [dataclasses.asdict(report) for report in rows]
        given.json.write_text(json.dumps(written, indent=1) + "\n", "utf-8")
    print(f"{len(rows)} kernels in {seconds} s by {given.jobs} processes, {wrong} with faults")
    return 1 if wrong else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", type=targets_of, default=list(TARGETS))
    parser.add_argument("--only", default="")
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path, nargs="+", help="print a page from files of --json and KERNEL_ERRORS")
    return parser.parse_args()


def targets_of(text: str) -> list[int | str]:
    words = text.split(",")
    unknown = [word for word in words if word not in {*map(str, TARGETS), *OTHERS}]
    if unknown:
        raise argparse.ArgumentTypeError(f"no target {unknown[0]}: give of {(*TARGETS, *OTHERS)}")
    return [int(word) if word.isdigit() else word for word in words]


if __name__ == "__main__":
    sys.exit(main())
