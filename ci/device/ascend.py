"""What only an NPU can answer, one question a call; the answer is JSON, and exit code 1 says that it is a bad one.

    python ci/device/ascend.py band --output band.json

    versions   what is installed, and which operators it has
    band       which keys a band of `pre_tokens` lets a query see: the backend asks the same at its start
    pages      which block sizes the operator reads through a block table, for one query token and for several
    tnd        whether layout TND goes with a block table, which the documents both deny and describe
    graph      whether a decode step is recorded, and a replay with other lengths equals the eager step
    memory     what the cache takes with and without a pool of its own, and whether it comes back
    same       how many tokens of answers are the same: FILE FILE of `pagedkv generate --json`

The first four call torch-npu's operators past the backend and its table of limits. Each answer is written as soon as it
is there, the documented calls first: what the device does not survive ends the process, and not what it has said.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from pagedkv import plugins
from pagedkv.api import GroupSpec, LayerSpec, Limits, OutOfDeviceMemory, PoolSpec
from pagedkv.api.torch import DTYPES
from pagedkv_ascend import limits, packages
from pagedkv_ascend.opening import load_torch_npu
from pagedkv_ascend.operators import BAND, EVERY, NO_MASK, RIGHT_DOWN, V1, V2

Names = Mapping[str, str]
Answer = dict[str, Any]
HEADS, KV_HEADS, DIM = 8, 2, 128
TOLERANCE = {"fp16": 2e-3, "bf16": 2e-2}
"""Largest difference from float64 for values of a normal distribution, rounded to the type on the way."""
FLAT, BY_HEAD = "blocks, size, heads x dim", "blocks, heads, size, dim"
OPERATORS = ("npu_scatter_pa_kv_cache", "npu_rms_norm", "npu_rotary_mul", "npu_swiglu", V1["op"], V2["op"])
SIZES = (512, 256, 128, 64, 32, 16, 24)
REFUSED = 300
"""Characters of a refusal that are kept."""


def attended(names: Names, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
    """The operator's result; `given` has its own names, or "q_lengths", "kv_lengths" for those that differ."""
    common = {names["heads"]: HEADS, "num_key_value_heads": KV_HEADS, names["scale"]: DIM**-0.5}
    made: torch.Tensor = getattr(torch.ops.npu, names["op"])(
        q, k, v, **common | {names.get(name, name): value for name, value in given.items()}
    )[0]
    return made


@functools.cache
def triangle(device: str) -> torch.Tensor:
    """The mask of the sparse modes."""
    side = limits.table()["attention"]["mask"]
    return torch.ones(side, side, dtype=torch.int8).triu_(1).to(device)


def everywhere(ask: Callable[..., Answer], device: str, *given: Any) -> Iterator[Answer]:
    """The question put to each form of the operator and each dtype; a refusal that the device survives is an answer."""
    for names in (V1, V2):
        for dtype in TOLERANCE if hasattr(torch.ops.npu, names["op"]) else ():
            said = {"op": names["op"], "dtype": dtype}
            try:
                found = ask(names, dtype, device, *given)
            except RuntimeError as error:
                yield said | {"refused": str(error).strip()[:REFUSED]}
                alive(device)
            else:
                yield said | found


def alive(device: str) -> None:
    """Raise what torch raises where the device computes nothing any more: what follows would tell of that alone."""
    torch.ones(1, device=device).add(1).cpu()


# -- versions ----------------------------------------------------------------------------------------------------------


def versions(device: str) -> Iterator[Answer]:
    """What is installed, and which of the operators that the backend may call are there."""
    wanted = ("pagedkv", "torch", "torch-npu", "triton", "triton-ascend", "transformers")
    installed = {one.metadata["Name"]: one.version for one in metadata.distributions()}
    yield {name: installed.get(name, "not installed") for name in wanted} | {
        "CANN": packages.cann_version(),
        "operators": {name: hasattr(torch.ops.npu, name) for name in OPERATORS}
        | {"_npu_reshape_and_cache": hasattr(torch.ops.atb, "_npu_reshape_and_cache")},
        "device": device if device == "cpu" else torch.npu.get_device_name(device),  # type: ignore[attr-defined]
    }


# -- how a band counts -------------------------------------------------------------------------------------------------


def band(device: str) -> Iterator[Answer]:
    """Queries of zeros weigh all keys alike, and the values of a unit matrix tell which keys were seen."""
    yield from everywhere(_band, device)


def _band(names: Names, dtype: str, device: str) -> Answer:
    seen = {
        f"{queries} of {keys} keys": _seen(names, dtype, device, queries, keys) for queries, keys in ((4, 4), (2, 6))
    }
    return {"seen": seen, "reading": _reading(seen), "ok": _reading(seen) != "neither"}


def _seen(names: Names, dtype: str, device: str, queries: int, keys: int) -> list[list[int]]:
    """For pre_tokens 0 to 3 the keys that the last query sees."""
    zeros = torch.zeros(1, max(queries, keys), HEADS * DIM, dtype=DTYPES[dtype], device=device)
    unit = torch.eye(keys, DIM, dtype=DTYPES[dtype]).repeat(1, KV_HEADS).unsqueeze(0).to(device)
    found = []
    for before in range(4):
        out = attended(
            names,
            zeros[:, :queries].contiguous(),
            zeros[:, :keys, : KV_HEADS * DIM].contiguous(),
            unit,
            input_layout="BSH",
            q_lengths=[queries],
            kv_lengths=[keys],
            atten_mask=triangle(device),
            sparse_mode=BAND,
            pre_tokens=before,
            next_tokens=0,
        )
        found.append((out[0, -1, :keys].float().cpu() > 0.05).nonzero().flatten().tolist())
    return found


def _reading(seen: Mapping[str, list[list[int]]]) -> str:
    """Which of two readings of the documents all of it agrees with, where pre_tokens is above 0."""
    lasts = {"2 of 6 keys": 5, "4 of 4 keys": 3}
    for reading, extra in (("keys from q - pre_tokens on", 1), ("pre_tokens counts the query's own", 0)):
        wanted = {
            name: [list(range(last + 1 - before - extra, last + 1)) for before in range(1, 4)]
            for name, last in lasts.items()
        }
        if all(found[1:] == wanted[name] for name, found in seen.items()):
            return reading
    return "neither"


# -- attention over blocks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Paged:
    """Sequences in shuffled blocks.

    q [tokens, heads, dim]; keys, values [blocks, size, KV heads, dim]; table int32 [rows, W].
    """

    size: int
    queries: list[int]
    contexts: list[int]
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor

    def wanted(self) -> torch.Tensor:
        """float64 [tokens, heads, dim]: causal from each sequence's last key."""
        rows = enumerate(torch.split(self.q, self.queries))
        return torch.cat([self._row(row, q) for row, q in rows])

    def _row(self, row: int, q: torch.Tensor) -> torch.Tensor:
        context, ratio = self.contexts[row], HEADS // KV_HEADS
        k, v = (
            plane[self.table[row].long()].flatten(0, 1)[:context].double().repeat_interleave(ratio, 1)
            for plane in (self.keys, self.values)
        )
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * DIM**-0.5
        hidden = torch.ones(len(q), context, dtype=torch.bool).triu_(context - len(q) + 1)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def paged(size: int, queries: list[int], contexts: list[int], dtype: str) -> Paged:
    """Such sequences, with random numbers that repeat."""
    made = torch.Generator().manual_seed(size)
    columns = max(-(-context // size) for context in contexts)
    blocks = len(contexts) * columns + 1

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made).to(DTYPES[dtype])

    table = (torch.randperm(blocks - 1, generator=made) + 1).view(len(contexts), columns).int()
    keys, values = (random(blocks, size, KV_HEADS, DIM) for _ in "kv")
    q = random(sum(queries), HEADS, DIM)
    return Paged(size=size, queries=queries, contexts=contexts, q=q, keys=keys, values=values, table=table)


def compared(out: torch.Tensor, case: Paged, dtype: str) -> Answer:
    """How far the result is from float64, and whether that is rounding."""
    got = out.double().cpu().reshape(case.q.shape)
    worst = float((got - case.wanted()).abs().nan_to_num(float("inf")).max())
    return {"worst": worst, "right": worst <= TOLERANCE[dtype]}


def pages(device: str) -> Iterator[Answer]:
    """Documented sizes must be right; of the others the answer says what they do."""
    asks = [(size, queries) for size in SIZES for queries in (1, 5)]
    for size, queries in sorted(asks, key=lambda one: not _documented(*one)):
        known = _documented(size, queries)
        for answer in everywhere(_pages, device, size, queries):
            said = {"size": size, "queries": queries, "documented": known}
            yield said | answer | {"ok": not known or bool(answer.get("right"))}


def _documented(size: int, queries: int) -> bool:
    phase = limits.table()["attention"]["one_query" if queries == 1 else "many_queries"]
    return limits.fits(size, phase["block_size"]["bf16"])


def _pages(names: Names, dtype: str, device: str, size: int, queries: int) -> Answer:
    case = paged(size, [queries] * 2, [2 * size + 3, queries + 2], dtype)
    several = queries > 1
    out = attended(
        names,
        case.q.view(2, queries, HEADS * DIM).to(device),
        case.keys.flatten(2).to(device),
        case.values.flatten(2).to(device),
        input_layout="BSH",
        q_lengths=[queries] * 2,
        kv_lengths=case.contexts,
        block_table=case.table.to(device),
        block_size=size,
        atten_mask=triangle(device) if several else None,
        sparse_mode=RIGHT_DOWN if several else NO_MASK,
        pre_tokens=EVERY,
        next_tokens=EVERY,
    )
    return compared(out, case, dtype)


def tnd(device: str) -> Iterator[Answer]:
    """One call for rows of one query token and of several; the documents name two orders of the cache."""
    for size in (128, 32):
        for order in (FLAT, BY_HEAD):
            for answer in everywhere(_tnd, device, size, order):
                yield {"size": size, "cache": order} | answer


def _tnd(names: Names, dtype: str, device: str, size: int, order: str) -> Answer:
    case = paged(size, [1, 5, 3], [2 * size + 3, size, 3], dtype)
    k, v = (
        (plane.flatten(2) if order == FLAT else plane.transpose(1, 2).contiguous()).to(device)
        for plane in (case.keys, case.values)
    )
    out = attended(
        names,
        case.q.to(device),
        k,
        v,
        input_layout="TND",
        q_lengths=[1, 6, 9],
        kv_lengths=case.contexts,
        block_table=case.table.to(device),
        block_size=size,
        atten_mask=triangle(device),
        sparse_mode=RIGHT_DOWN,
    )
    return compared(out, case, dtype)


# -- the backend -------------------------------------------------------------------------------------------------------


def created(**options: Any) -> Any:
    """The backend as `pagedkv` makes it."""
    selected = plugins.select("ascend")
    return plugins.create(selected, options)


class Warnings(logging.Handler):
    """Keeps what is warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage()[:REFUSED])


def graph(device: str) -> Iterator[Answer]:
    """A step of one layer recorded, and replayed for three batches; a refusal to record is a warning of the backend."""
    from measure import Case, Work, graphs, native  # type: ignore[import-not-found]  # beside this file

    heard = Warnings()
    logging.getLogger("pagedkv").addHandler(heard)
    backend = created()
    try:
        for rows in (1, 8):
            dtype = native(backend)
            case = Case(backend, Work(rows=rows, queries=1, context=300), DTYPES[dtype])
            answer = graphs(case)
            unrecorded = [line for line in heard.said if "captured" in line]
            yield {"rows": rows, **answer, "unrecorded": unrecorded} | {
                "ok": not unrecorded and answer["worst"] <= TOLERANCE[dtype]
            }
            case.pool.close()
    finally:
        backend.close()
        logging.getLogger("pagedkv").removeHandler(heard)


def memory(device: str) -> Iterator[Answer]:
    """Memory before a cache, with it, and after it; then a cache that cannot be, after which a small one still can."""
    for pooled in (True, False):
        backend = created(use_ascend_memory_pool=pooled)
        try:
            yield {"use_ascend_memory_pool": pooled} | _memory(backend)
        finally:
            backend.close()


def _memory(backend: Any) -> Answer:
    taken, said = 1 << 30, {"before": _free(backend)}
    pool = backend.alloc_pool(cache(backend, taken))
    said["with"] = _free(backend)
    pool.close()
    said["after"] = _free(backend)
    refused = _too_much(backend)
    backend.alloc_pool(cache(backend, taken)).close()
    before, held, after = (sum(said[when].values()) for when in ("before", "with", "after"))
    good = before - held >= taken // 2 and after - held >= taken // 2 and refused is not None
    return {"cache": taken, **said, "refused": refused, "ok": good}


def _free(backend: Any) -> dict[str, int]:
    """Bytes that the driver has, and those that torch keeps of what was given back."""
    found = backend.memory()
    return {"free": found.free or 0, "reclaimable": found.reclaimable or 0}


def _too_much(backend: Any) -> str | None:
    """The words with which a cache of twice the device's memory is refused."""
    try:
        backend.alloc_pool(cache(backend, 2 * (backend.memory().total or 0))).close()
    except OutOfDeviceMemory as error:
        return str(error)
    return None


def cache(backend: Any, nbytes: int) -> PoolSpec:
    """A cache of about so many bytes, of so many layers that no tensor of it is larger than an operator takes."""
    dtype, layers = backend.capabilities().dtypes[0], 64
    one = LayerSpec(index=0, q_heads=HEADS, kv_heads=KV_HEADS, k_dim=DIM, v_dim=DIM, scale=DIM**-0.5)
    several = tuple(dataclasses.replace(one, index=index) for index in range(layers))
    block = layers * 2 * 128 * KV_HEADS * DIM * DTYPES[dtype].itemsize
    return PoolSpec(
        groups=(GroupSpec(layers=several, block_size=128, kv_dtype=dtype),),
        num_blocks=max(2, nbytes // block),
        dtype=dtype,
        limits=Limits(rows=1, tokens=1, context=128),
    )


# -- answers -----------------------------------------------------------------------------------------------------------


def same(one: Path, other: Path) -> Iterator[Answer]:
    """For each answer of two files how many first tokens are the same."""
    for first, second in zip_longest(_answers(one), _answers(other), fillvalue=None):
        if first is None or second is None:
            yield {"ok": False, "missing": str(one if first is None else other)}
            continue
        both = list(zip(first["token_ids"], second["token_ids"], strict=False))
        count = next((place for place, (a, b) in enumerate(both) if a != b), len(both))
        whole = count == len(first["token_ids"]) == len(second["token_ids"])
        yield {"prompt": first["prompt"], "tokens": len(first["token_ids"]), "same": count, "ok": whole}


def _answers(path: Path) -> list[Answer]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


# -- the command line --------------------------------------------------------------------------------------------------

QUESTIONS: Mapping[str, Callable[..., Iterator[Answer]]] = {
    "versions": versions,
    "band": band,
    "pages": pages,
    "tnd": tnd,
    "graph": graph,
    "memory": memory,
    "same": same,
}


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("files", nargs="*", type=Path, help="of same: two")
    parser.add_argument("--device", default="npu:0", help='"cpu" where a stand-in for the operators is registered')
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(words)


def answered(given: argparse.Namespace) -> bool:
    """Ask, write each answer down, and say whether all of them are good ones."""
    ask = QUESTIONS[given.question]
    said: list[Answer] = []
    for answer in ask(*given.files) if given.question == "same" else ask(given.device):
        said.append(answer)
        print(json.dumps(answer), flush=True)
        given.output.write_text(json.dumps(said, indent=1) + "\n", "utf-8")
    return bool(said) and all(answer.get("ok", True) for answer in said)


def main() -> None:
    given = arguments()
    if given.question != "same" and given.device != "cpu":
        if reason := packages.against():
            raise SystemExit(f"{given.question} cannot be asked: {reason}")
        load_torch_npu()
    raise SystemExit(0 if answered(given) else 1)


if __name__ == "__main__":
    main()
