"""Caches, batches and expected values for the tests of attention."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from pagedkv.api import LayerSpec
from pagedkv.conformance.oracle import attention
from pagedkv_cuda.kernels.arguments import Cache, Layer, Rows
from pagedkv_cuda.kernels.attention import Choice, attend, scratch_floats
from tests.backends.cuda.interpreted import errors

TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Largest difference from float64, of values about 1."""


@dataclass
class Setup:
    """One layer, and rows of (context, query tokens)."""

    rows: list[tuple[int, int]]
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    stored: torch.dtype | None = None
    scales: str = "token"
    num_decode: int = 0
    decode_q: int = 1
    scratch: int | None = None
    seed: int = 0
    layer: dict = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return {0: "prefill", len(self.rows): "decode"}.get(self.num_decode, "mixed") + " attention"


class Bench:
    """A cache filled by torch, everything that no row owns poisoned with NaN, and the oracle beside it."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.random = np.random.default_rng(setup.seed)
        self.table = self._table()
        blocks = int(self.table.max()) + 3
        self.cache = self._cache(blocks)
        counts = [count for _, count in setup.rows]
        self.tokens = sum(counts)
        self.q = self._numbers(self.tokens + 2, setup.heads[0], setup.dims[0])
        self.q[self.tokens :] = float("nan")
        self.out = torch.full((self.tokens + 2, setup.heads[0], setup.dims[1]), 7.0, dtype=setup.dtype)
        self.lse = torch.full((self.tokens + 2, setup.heads[0]), 7.0)
        self.cu_q = torch.tensor(np.concatenate([[0], np.cumsum(counts)]), dtype=torch.int32)
        self.layer = self._layer()
        self.write()

    def write(self) -> None:
        """Every row's whole context, quantized by torch."""
        size = self.setup.block_size
        for row, (context, _) in enumerate(self.setup.rows):
            index = np.arange(context)
            block, slot = self.table[row + 1, index // size], index % size
            for dim, stored, scale in zip(self.setup.dims, *self._pairs(), strict=True):
                numbers = self._numbers(context, self.setup.heads[1], dim)
                if scale is not None and scale.ndim == 3:
                    scale[block, :, slot] = torch.linspace(0.01, 0.03, context)[:, None]
                stored[block, :, slot] = _quantized(numbers, _by_slot(stored, scale)[block, :, slot], stored.dtype)

    def attend(self, target: int = 80, choice: Choice | None = None, lse: bool = True) -> torch.Tensor:
        setup = self.setup
        floats = scratch_floats(setup.heads[0], setup.dims[1], max(setup.num_decode, 1), setup.decode_q)
        scratch = torch.full((floats if setup.scratch is None else setup.scratch,), float("nan"))
        rows = Rows(
            cu_q=self.cu_q,
            ctx_len=torch.tensor([context for context, _ in setup.rows], dtype=torch.int32),
            block_table=torch.from_numpy(self.table),
            rows=torch.arange(1, len(setup.rows) + 1, dtype=torch.int32),
            num_seqs=len(setup.rows),
            num_tokens=self.tokens,
            max_ctx=max(context for context, _ in setup.rows),
            num_decode=setup.num_decode,
            decode_q=setup.decode_q,
        )
        given = self.lse if lse else None
        attend(self.q, self.out, self.cache, self.layer, rows, scratch, given, target=target, choice=choice or Choice())
        return self.out

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """(out, lse) in float64 from the bytes of the cache."""
        setup = self.setup
        spec = LayerSpec(
            index=0, q_heads=setup.heads[0], kv_heads=setup.heads[1], k_dim=setup.dims[0], v_dim=setup.dims[1],
            scale=self.layer.scale, causal=self.layer.causal, window=self.layer.window, softcap=self.layer.softcap,
            sinks=self.layer.sinks is not None, alibi=self.layer.alibi is not None,
        )  # fmt: skip
        outs, logs = [], []
        for row, (context, count) in enumerate(setup.rows):
            first = int(self.cu_q[row])
            q = self.q[first : first + count].double().numpy()
            keys, values = self.read(row, context)
            out, log = attention(spec, q, keys, values, sinks=self.layer.sinks, alibi=self.layer.alibi)
            outs.append(out), logs.append(log)
        return np.concatenate(outs), np.concatenate(logs)

    def read(self, row: int, context: int) -> tuple[np.ndarray, np.ndarray]:
        """The keys and values of a row in float64, dequantized by torch."""
        index = np.arange(context)
        block, slot = self.table[row + 1, index // self.setup.block_size], index % self.setup.block_size
        return tuple(_dequantized(*pair)[block, :, slot] for pair in zip(*self._pairs(), strict=True))

    def check(self) -> None:
        """Whatever `attend` left against the oracle; rows past the last token as they were."""
        out, lse = self.expected()
        tolerance = TOLERANCE[self.setup.dtype]
        errors.note(self.setup.kind, self.setup.dtype, self.out[: self.tokens], out, self.setup.stored)
        np.testing.assert_allclose(self.out[: self.tokens].double().numpy(), out, rtol=0, atol=tolerance)
        np.testing.assert_allclose(self.lse[: self.tokens].double().numpy(), lse, rtol=0, atol=4 * tolerance)
        assert (self.out[self.tokens :] == 7.0).all() and (self.lse[self.tokens :] == 7.0).all()

    def _pairs(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor | None, ...]]:
        return (self.cache.keys, self.cache.values), (self.cache.k_scale, self.cache.v_scale)

    def _numbers(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.random.standard_normal(shape, np.float32)).to(self.setup.dtype)

    def _table(self) -> np.ndarray:
        """Shuffled blocks, those of all rows in between each other; entries past a context are 0."""
        needed = [-(-context // self.setup.block_size) for context, _ in self.setup.rows]
        free = self.random.permutation(np.arange(1, sum(needed) + 1))
        table = np.zeros((len(needed) + 1, max([*needed, 1])), np.int32)
        for row, count in enumerate(needed):
            table[row + 1, :count], free = free[:count], free[count:]
        return table

    def _cache(self, blocks: int) -> Cache:
        setup = self.setup
        stored = setup.stored or setup.dtype
        shape = (blocks, setup.heads[1], setup.block_size)
        both = [_poisoned((*shape, dim), stored) for dim in setup.dims]
        if setup.stored is None or stored in TOLERANCE:
            return Cache(keys=both[0], values=both[1])
        scales = {
            "token": [torch.full(shape, float("nan")) for _ in both],
            "head": [torch.linspace(0.02, 0.03, setup.heads[1]) for _ in both],
            "tensor": [torch.tensor(0.025) for _ in both],
        }[setup.scales]
        return Cache(keys=both[0], values=both[1], k_scale=scales[0], v_scale=scales[1])

    def _layer(self) -> Layer:
        given = dict(self.setup.layer)
        heads = self.setup.heads[0]
        if given.pop("sinks", False):
            given["sinks"] = torch.linspace(-1.0, 2.0, heads)
        if given.pop("alibi", False):
            given["alibi"] = torch.linspace(0.01, 0.2, heads)
        return Layer(q_heads=heads, kv_heads=self.setup.heads[1], scale=self.setup.dims[0] ** -0.5, **given)


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Filled with NaN where the dtype has it, with its most extreme number elsewhere; block 0 holds zeros."""
    filled = (
        torch.full(shape, 127, dtype=torch.int8) if dtype == torch.int8 else torch.full(shape, float("nan")).to(dtype)
    )
    filled[0] = torch.zeros(shape[1:]).to(dtype)
    return filled


def _by_slot(stored: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Scales [blocks, heads, slots, 1]."""
    if scale is None:
        scale = torch.ones(())
    return (scale if scale.ndim == 3 else scale.reshape(1, -1, 1).expand(stored.shape[:3]))[..., None]


def _quantized(numbers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scaled = numbers.float() / scale
    return scaled.round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else scaled.to(dtype)


def _dequantized(stored: torch.Tensor, scale: torch.Tensor | None) -> np.ndarray:
    numbers = stored.double() if stored.dtype == torch.int8 else stored.float().double()
    return (numbers * _by_slot(stored, scale).double()).numpy()
