"""Every kernel of a decoder at the shapes of the standard work, called as the engine calls it: through the contract.

A case is a ring of calls of equal work on different memory: together they touch more than the processor's caches hold,
so a call finds its data where a real step finds it, which reads all other weights and planes in between. Kernels whose
data a step has just written (norms, turns, gates) find it in the caches there, and here.

Bytes are the least that must move: each weight, key and value once, and each activation in and out. Operations are
those of the formula, a multiply-add counted as 2, or as 1 where it multiplies bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from paged import Paged, Rows

from pagedkv.api import AttentionBackend, GroupSpec, LayerSpec, OpSpec
from pagedkv.models.packing import element_bytes
from pagedkv.ops import resolve
from pagedkv.ops.gguf_quants import named_type

FLOAT = 4
Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """A decoder's sizes. `head_format`: of the table and the head that shares it."""

    layers: int = 30
    q_heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    hidden: int = 576
    inner: int = 1536
    vocab: int = 49152
    head_format: str = "Q8_0"

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Name -> outputs, inputs of a layer's products."""
        queries = self.q_heads * self.head_dim
        return {
            "qkv": (queries + 2 * self.kv_heads * self.head_dim, self.hidden),
            "o": (self.hidden, queries),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }

    def group(self, layers: int, block_size: int) -> GroupSpec:
        """So many layers, float32 in the cache."""
        specs = tuple(
            LayerSpec(
                index=i,
                q_heads=self.q_heads,
                kv_heads=self.kv_heads,
                k_dim=self.head_dim,
                v_dim=self.head_dim,
                scale=self.head_dim**-0.5,
            )
            for i in range(layers)
        )
        return GroupSpec(layers=specs, block_size=block_size, kv_dtype="fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What is varied. `working_set`: bytes that the calls of a case touch together, at least."""

    rows: tuple[int, ...] = (1, 8, 16, 32, 128, 512)
    formats: tuple[str, ...] = ("Q4_1", "Q4_0", "Q8_0")
    batches: tuple[int, ...] = (1, 8, 16, 32)
    contexts: tuple[int, ...] = (192, 2048, 8160)
    block_sizes: tuple[int, ...] = (16, 32, 64, 128)
    prompts: tuple[tuple[int, int], ...] = ((128, 0), (512, 0), (2048, 0), (128, 1920), (512, 1536), (512, 7648))
    """(tokens, tokens cached before them)."""
    tokens: tuple[int, ...] = (1, 32, 128, 2048)
    copies: tuple[int, ...] = (1, 16, 64)
    working_set: int = 1 << 29


QUICK = Sweep(
    rows=(1, 32, 512),
    formats=("Q4_1",),
    batches=(1, 32),
    contexts=(192, 2048),
    block_sizes=(16, 64),
    prompts=((128, 0), (512, 0), (128, 1920)),
    tokens=(1, 32, 512),
    copies=(1, 16),
    working_set=1 << 28,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Calls of equal work, each on memory of its own, and that work. `copies`: it is copying that limits it.

    `macs`: its operations multiply bytes. `cached`: what it reads has just been written.
    """

    kernel: str
    shape: str
    nbytes: int
    operations: int = 0
    macs: bool = False
    copies: bool = False
    cached: bool = False
    calls: Sequence[Call] = field(repr=False)


def all_cases(backend: AttentionBackend, shapes: Shapes, sweep: Sweep) -> dict[str, Callable[[], Iterator[Case]]]:
    """Kernel -> its cases, whose memory is made when they are reached and goes with the next one's."""
    found: dict[str, Callable[[], Iterator[Case]]] = {
        f"linear {name}": partial(linears, backend, shapes, sweep, name) for name in (*sweep.formats, "fp32")
    }
    if shapes.head_format not in sweep.formats:
        found[f"linear {shapes.head_format}"] = partial(heads, backend, shapes, sweep, shapes.head_format)
    return found | {
        "attention, decode": partial(decodes, backend, shapes, sweep),
        "attention, prefill": partial(prefills, backend, shapes, sweep),
        "append": partial(appends, backend, shapes, sweep),
        "add_rms_norm": partial(norms, backend, shapes, sweep),
        "rope": partial(ropes, backend, shapes, sweep),
        "silu_mul": partial(gates, backend, shapes, sweep),
        "copy_blocks": partial(block_copies, backend, shapes, sweep),
    }


# -- products ----------------------------------------------------------------------------------------------------------


def linears(backend: AttentionBackend, shapes: Shapes, sweep: Sweep, name: str) -> Iterator[Case]:
    """A layer's products with weights in the format `name`, or in fp32, and the head where it has that format."""
    for product, (n, k) in shapes.products.items():
        yield from _products(backend, sweep, name, product, n, k)
    if name in (shapes.head_format, "fp32"):
        yield from heads(backend, shapes, sweep, name)


def heads(backend: AttentionBackend, shapes: Shapes, sweep: Sweep, name: str) -> Iterator[Case]:
    """The product of the head."""
    yield from _products(backend, sweep, name, "head", shapes.vocab, shapes.hidden)


def _products(backend: AttentionBackend, sweep: Sweep, name: str, product: str, n: int, k: int) -> Iterator[Case]:
    attributes = {} if name == "fp32" else {"format": name}
    op: Any = resolve(backend, "linear", OpSpec(dtype="fp32", dims={"n": n, "k": k}, attributes=attributes))
    weights = torch.randn(n, k) if name == "fp32" else torch.from_numpy(random_blocks(name, n, k))
    size = named_type(name).nbytes(n * k) if name != "fp32" else FLOAT * n * k
    packed = [op.pack(weights.clone()) for _ in range(ring(size, sweep))]
    for rows in sweep.rows:
        x = torch.randn(rows, k)
        yield Case(
            kernel=f"linear {name}",
            shape=f"{product} {n} x {k}, {rows} rows",
            nbytes=size + FLOAT * rows * (n + k),
            operations=rows * n * k * (2 if name == "fp32" else 1),
            macs=name != "fp32",
            calls=[partial(op, x, each) for each in packed],
        )


def random_blocks(name: str, n: int, k: int) -> np.ndarray:
    """GGUF blocks uint8 [n, bytes of a row]: random codes, scales (and offsets) 0.01."""
    kind = named_type(name)
    blocks = np.random.default_rng(0).integers(0, 256, (n * k // kind.block_size, kind.block_bytes), dtype=np.uint8)
    head = 4 if name == "Q4_1" else 2
    blocks[:, :head] = np.full(head // 2, 0.01, np.float16).view(np.uint8)
    return blocks.reshape(n, -1)


def ring(nbytes: int, sweep: Sweep) -> int:
    """How many calls of so many bytes fill the working set; two at least."""
    return max(2, -(-sweep.working_set // nbytes))


# -- attention ---------------------------------------------------------------------------------------------------------


def decodes(backend: AttentionBackend, shapes: Shapes, sweep: Sweep) -> Iterator[Case]:
    """One query of each of B rows over its whole context."""
    for context in sweep.contexts:
        for batch in sweep.batches:
            for block_size in sweep.block_sizes:
                work = Rows(count=batch, queries=1, context=context)
                shape = f"{batch} x 1 over {context}, blocks of {block_size}"
                yield _attention(backend, shapes, sweep, "attention, decode", shape, work, block_size)


def prefills(backend: AttentionBackend, shapes: Shapes, sweep: Sweep) -> Iterator[Case]:
    """One prompt, alone and behind a cached prefix."""
    for tokens, cached in sweep.prompts:
        work = Rows(count=1, queries=tokens, context=tokens + cached)
        shape = f"{tokens} over {tokens + cached}, blocks of 16"
        yield _attention(backend, shapes, sweep, "attention, prefill", shape, work, 16)


def _attention(
    backend: AttentionBackend, shapes: Shapes, sweep: Sweep, kernel: str, shape: str, work: Rows, block_size: int
) -> Case:
    paged = _paged(backend, shapes, sweep, work, block_size)
    q = torch.randn(work.tokens, shapes.q_heads, shapes.head_dim)
    out = torch.empty_like(q)
    plan = paged.plan(work)
    return Case(
        kernel=kernel,
        shape=shape,
        nbytes=work.count * work.context * _token_bytes(shapes) + 2 * q.nbytes,
        operations=work.pairs * shapes.q_heads * 4 * shapes.head_dim,
        calls=[partial(backend.attend, plan, layer, q, None, None, out) for layer in range(paged.layers)],
    )


def _paged(backend: AttentionBackend, shapes: Shapes, sweep: Sweep, work: Rows, block_size: int) -> Paged:
    layers = ring(work.count * work.context * _token_bytes(shapes), sweep)
    return Paged(backend, shapes.group(layers, block_size), work)


def _token_bytes(shapes: Shapes) -> int:
    """Keys and values of one token in one layer."""
    return 2 * shapes.kv_heads * shapes.head_dim * element_bytes("fp32")


def appends(backend: AttentionBackend, shapes: Shapes, sweep: Sweep) -> Iterator[Case]:
    """Keys and values of T new tokens of one row."""
    for tokens in sweep.tokens:
        work = Rows(count=1, queries=tokens, context=max(tokens, 192))
        paged = _paged(backend, shapes, sweep, work, 16)
        plan, kv = paged.plan(work, writes=True), torch.randn(2, tokens, shapes.kv_heads, shapes.head_dim)
        yield Case(
            kernel="append",
            shape=f"{tokens} tokens, blocks of 16",
            nbytes=2 * tokens * _token_bytes(shapes),
            copies=True,
            calls=[partial(backend.attend, plan, layer, None, kv[0], kv[1], None) for layer in range(paged.layers)],
        )


def block_copies(backend: AttentionBackend, shapes: Shapes, sweep: Sweep) -> Iterator[Case]:
    """N blocks within a pool of all layers, those of a preempted or forked sequence."""
    for count in sweep.copies:
        group = shapes.group(shapes.layers, 16)
        block = 16 * shapes.layers * _token_bytes(shapes)
        turns = ring(2 * count * block, sweep)
        paged = Paged(backend, group, Rows(count=1, queries=1, context=16 * 2 * count * turns))
        ids = np.random.default_rng(1).permutation(2 * count * turns).reshape(turns, count, 2).astype(np.int32) + 1
        yield Case(
            kernel="copy_blocks",
            shape=f"{count} blocks of 16, {shapes.layers} layers",
            nbytes=2 * count * block,
            copies=True,
            calls=[partial(_copied, backend, paged, pairs) for pairs in ids],
        )


def _copied(backend: AttentionBackend, paged: Paged, pairs: np.ndarray) -> None:
    backend.copy_blocks(paged.pool, paged.pool, pairs).join()


# -- elementwise -------------------------------------------------------------------------------------------------------


def norms(backend: AttentionBackend, shapes: Shapes, sweep: Sweep) -> Iterator[Case]:
    """residual += x and its norm: an addition, a square, a sum, two factors."""
    op = resolve(backend, "add_rms_norm", OpSpec(dtype="fp32", dims={"dim": shapes.hidden}))
    for tokens in sweep.tokens:
        x, residual = torch.zeros(tokens, shapes.hidden), torch.randn(tokens, shapes.hidden)
        weight = torch.ones(shapes.hidden)
        yield _elementwise(
            "add_rms_norm", tokens, 4 * x.nbytes + weight.nbytes, 5 * x.numel(), partial(op, x, residual, weight, 1e-5)
        )


def ropes(backend: AttentionBackend, shapes: Shapes, sweep: Sweep) -> Iterator[Case]:
    """Queries and keys turned in place, slices of one tensor: four products and two sums for each pair."""
    heads, dim = shapes.q_heads + shapes.kv_heads, shapes.head_dim
    dims = {"q_heads": shapes.q_heads, "kv_heads": shapes.kv_heads, "head_dim": dim, "rotary_dim": dim}
    op = resolve(backend, "rope", OpSpec(dtype="fp32", dims=dims))
    for tokens in sweep.tokens:
        both = torch.randn(tokens, heads + shapes.kv_heads, dim)
        angle = torch.rand(tokens, dim // 2)
        call = partial(op, both[:, : shapes.q_heads], both[:, shapes.q_heads : heads], angle.cos(), angle.sin())
        numbers = tokens * heads * dim
        yield _elementwise("rope", tokens, 2 * FLOAT * numbers + 2 * angle.nbytes, 3 * numbers, call)


def gates(backend: AttentionBackend, shapes: Shapes, sweep: Sweep) -> Iterator[Case]:
    """gate / (1 + e^-gate) times up; the exponential counts as one operation, so arithmetic is more than it seems."""
    op = resolve(backend, "silu_mul", OpSpec(dtype="fp32", dims={"dim": shapes.inner}))
    for tokens in sweep.tokens:
        x = torch.randn(tokens, 2 * shapes.inner)
        yield _elementwise("silu_mul", tokens, x.nbytes * 3 // 2, 5 * x.numel() // 2, partial(op, x))


def _elementwise(kernel: str, tokens: int, nbytes: int, operations: int, call: Call) -> Case:
    return Case(
        kernel=kernel,
        shape=f"{tokens} tokens",
        nbytes=nbytes,
        operations=operations,
        copies=True,
        cached=True,
        calls=[call],
    )
