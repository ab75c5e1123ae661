"""Attention of one plan: which calls of the operators it takes.

    rows of one query token     one call through the block table
    a row of several, block size 128, 256, 384, 512
                                one call through the block table, causal from its end
    a row of several, other block sizes, which the operator does not page there
                                fresh: one call on the step's own keys and values
                                else: its blocks gathered, at most `gathered` keys at a time; the pieces' results are
                                merged by their log-sum-exp

A sink is applied afterwards, from the log-sum-exp: exp(lse) / (exp(lse) + exp(sink)) of the result is what the sink
leaves of it. Layers whose heads lie in several tensors take a call for each.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagedkv.api import LayerSpec, PoolSpec, UnsupportedError
from pagedkv.api.torch import DTYPES
from pagedkv_ascend import limits
from pagedkv_ascend.operators import BAND, EVERY, NO_MASK, RIGHT_DOWN, Call, Operators
from pagedkv_ascend.plans import AscendPlan, Prompt, View
from pagedkv_ascend.pool import Layer, Part
from pagedkv_ascend.runtime import Runtime

GATHERED = 8192
"""Keys that are gathered at a time, unless a step's tokens and a window need more."""
SPELLED = {dtype: name for name, dtype in DTYPES.items()}
LEAST_DIM = 16
"""The head dim of the question how a band counts: the least that the operator takes."""


def gathered(spec: PoolSpec, block_size: int) -> int:
    """Keys of one row that are gathered at a time: whole blocks, with all that a step's queries see of a window."""
    window = max((layer.window or 0 for group in spec.groups for layer in group.layers), default=0)
    wanted = max(GATHERED, spec.limits.tokens) + window
    return (-(-min(wanted, max(1, spec.limits.context)) // block_size) + 1) * block_size


def working_bytes(spec: PoolSpec) -> int:
    """Bytes of working memory for a pool like `spec`: pure arithmetic.

    Queries made contiguous, results, what is gathered, and parts that are merged. The operators' own workspace is not
    in it: the engine measures it with its largest step.
    """
    item, tokens = DTYPES[spec.dtype].itemsize, spec.limits.tokens + spec.limits.rows
    most = 0
    for group in spec.groups:
        paged = limits.pages_prompts(group.block_size)
        keys = 0 if paged else gathered(spec, group.block_size)
        for layer in group.layers:
            wide = limits.width(layer)
            rows = tokens * layer.q_heads * (wide * (3 * item + 4 * 4) + 4 * 4)
            most = max(most, rows + (2 * keys + 2 * tokens) * layer.kv_heads * wide * item)
    return most + int(limits.table()["attention"]["mask"]) ** 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Heads:
    """One part of a layer in a call: its caches, and the query heads that read them."""

    layer: Layer
    part: Part
    queries: slice

    @property
    def spec(self) -> LayerSpec:
        return self.layer.spec


@dataclass(kw_only=True, eq=False)
class Kept:
    """Memory of recorded calls, which stays from replay to replay: layers of one shape take turns in it.

    query [rows, heads, dim]; result [rows, 1, heads * dim]; logs [rows, heads, 1, 1], or [1] where nobody asks.
    """

    query: torch.Tensor
    result: torch.Tensor
    logs: torch.Tensor
    workspace: torch.Tensor

    @classmethod
    def of(cls, call: Call, workspace: torch.Tensor) -> Kept:
        """For calls like this one."""
        query = torch.empty_like(call.query[:, 0])
        logs = query.new_empty((*query.shape[:2], 1, 1) if call.lse else (1,), dtype=torch.float32)
        return cls(query=query, result=torch.empty_like(query.flatten(1).unsqueeze(1)), logs=logs, workspace=workspace)


class Attention:
    """The calls of one instance."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._operators = Operators()
        self._mask: torch.Tensor | None = None
        self._inclusive: dict[torch.dtype, bool] = {}
        self._kept: weakref.WeakValueDictionary[Any, Kept] = weakref.WeakValueDictionary()

    def append(self, plan: AscendPlan, layer: Layer, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k, v [A, kv_heads, dim] to the plan's slots: those of padding never reach the operator."""
        if plan.slots is None:
            return
        wide = limits.width(layer.spec)
        k, v = (_kept(tensor[: plan.num_slots], plan, wide) for tensor in (k, v))
        for part in layer.parts:
            heads, size = slice(part.first, part.first + part.heads), plan.block_size
            caches = (cache.view(-1, size, part.heads, wide) for cache in (part.keys, part.values))
            keys, values = caches
            self._operators.append(k[:, heads].contiguous(), v[:, heads].contiguous(), keys, values, plan.slots)

    def attend(
        self,
        plan: AscendPlan,
        layer: Layer,
        q: torch.Tensor,
        own: tuple[torch.Tensor, torch.Tensor] | None,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Attention of q into out, log of the denominators into lse. `own`: the k and v of this very call."""
        spec = layer.spec
        ratio, wide = spec.q_heads // spec.kv_heads, limits.width(spec)
        for part in layer.parts:
            heads = Heads(layer=layer, part=part, queries=slice(part.first * ratio, (part.first + part.heads) * ratio))
            mine = _wide(q[: plan.num_tokens, heads.queries], wide).contiguous()
            ends = lse is not None or spec.sinks
            if plan.num_singles:
                rows = slice(0, plan.num_singles) if plan.singles is None else plan.singles
                result, logs = self._decode(plan, heads, mine[rows], ends)
                if plan.padding is not None:
                    unused = plan.padding.bool().unsqueeze(1)
                    result = result.masked_fill(unused.unsqueeze(2), 0)
                    logs = logs.masked_fill(unused, 0) if logs is not None else None
                _store(heads, rows, result, logs, out, lse)
            for prompt in plan.prompts:
                rows = slice(prompt.first, prompt.first + prompt.count)
                result, logs = self._prompt(plan, heads, prompt, mine[rows], own, ends)
                _store(heads, rows, result, logs, out, lse)

    # -- rows of one query ---------------------------------------------------------------------------------------------

    def _decode(
        self, plan: AscendPlan, heads: Heads, q: torch.Tensor, ends: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        view = plan.views[heads.spec.window]
        call = _checked(_decoding(plan, heads, view, q, ends))
        if not self._runtime.recording:
            result, logs = self._operators.attention(call)
            return result[:, 0], _by_row(logs) if ends else None
        kept = self._kept_for(call)
        kept.query.copy_(q)
        self._runtime.task(
            lambda: self._operators.attention_into(
                _decoding(plan, heads, view, kept.query, ends), kept.workspace, kept.result, kept.logs
            )
        )
        return kept.result.view(q.shape), _by_row(kept.logs) if ends else None

    def _kept_for(self, call: Call) -> Kept:
        """What recorded calls of this shape use; it goes with the last of them."""
        tensors = (call.query, call.key, call.table, call.mask)
        key = (*(None if one is None else (tuple(one.shape), one.dtype) for one in tensors), call.lse)
        found = self._kept.get(key)
        if found is None:
            with torch.inference_mode(False):  # as its tensors are written in either mode
                found = self._kept[key] = Kept.of(call, self._operators.workspace(call))
        return found

    # -- rows of several -----------------------------------------------------------------------------------------------

    def _prompt(
        self,
        plan: AscendPlan,
        heads: Heads,
        prompt: Prompt,
        q: torch.Tensor,
        own: tuple[torch.Tensor, torch.Tensor] | None,
        ends: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(result [count, heads, width], log-sum-exp float32 [count, heads])."""
        part, size, window = heads.part, plan.block_size, heads.spec.window
        skipped = 0 if window is None else max(0, prompt.context - prompt.count + 1 - window) // size
        blocks, keys = prompt.blocks[skipped:], prompt.context - skipped * size
        if limits.pages_prompts(size):
            call = self._causal(heads, q, part.keys, part.values, keys, ends, table=blocks.unsqueeze(0), size=size)
            return _alone(self._call(call), ends)
        if prompt.fresh and own is not None:
            k, v = (_own(tensor, prompt, part, q.shape[-1]) for tensor in own)
            return _alone(self._call(self._causal(heads, q, k, v, prompt.count, ends)), ends)
        return self._gathered(plan, heads, q, blocks, keys, ends)

    def _gathered(
        self, plan: AscendPlan, heads: Heads, q: torch.Tensor, blocks: torch.Tensor, keys: int, ends: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Over blocks that are gathered a piece at a time: the last piece is causal, those before it are seen whole."""
        size = plan.block_size
        pieces = list(_pieces(keys, len(q), gathered(plan.pool.spec, size), size))
        ends = ends or len(pieces) > 1
        done = []
        for number, (start, length) in enumerate(pieces):
            ids = blocks[start // size : -(-(start + length) // size)]
            k, v = (
                cache.index_select(0, ids).flatten(0, 1)[:length].unsqueeze(0)
                for cache in (heads.part.keys, heads.part.values)
            )
            if number == len(pieces) - 1:
                call = self._causal(heads, q, k, v, length, ends)
            else:
                call = _plain(heads, q, k, v, length, ends)
            done.append(_alone(self._call(call), ends))
        return done[0] if len(done) == 1 else _merged(done)

    def _causal(
        self,
        heads: Heads,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: int,
        ends: bool,
        *,
        table: torch.Tensor | None = None,
        size: int = 0,
    ) -> Call:
        """The call in which the last query sees the last key, and as far back as its window goes."""
        window = heads.spec.window
        banded = window is not None and window < keys
        return Call(
            query=q.unsqueeze(0),
            key=k,
            value=v,
            kv_heads=heads.part.heads,
            scale=heads.spec.scale,
            kv_lengths=[keys],
            table=table,
            block_size=size,
            mask=self._triangle(q.device),
            sparse_mode=BAND if banded else RIGHT_DOWN,
            pre_tokens=self._pre_tokens(window, q.dtype) if banded and window is not None else EVERY,
            next_tokens=0 if banded else EVERY,
            lse=ends,
        )

    def _triangle(self, device: torch.device) -> torch.Tensor:
        """The mask of the sparse modes: above the diagonal hides."""
        if self._mask is None:
            side = limits.table()["attention"]["mask"]
            self._mask = torch.ones(side, side, dtype=torch.int8).triu_(1).to(device)
        return self._mask

    # -- how a band counts ---------------------------------------------------------------------------------------------

    def settle(self, spec: PoolSpec, device: str) -> None:
        """Ask the operator how it counts a band, where a layer has a window: documents can be read both ways.

        Four keys, queries of zeros, and values that tell which keys were seen. Raises `UnsupportedError` for an answer
        that is neither reading.
        """
        dtype = DTYPES[spec.dtype]
        if dtype in self._inclusive or not any(layer.window for group in spec.groups for layer in group.layers):
            return
        zeros = torch.zeros(1, 4, LEAST_DIM, dtype=dtype, device=device)
        values = torch.eye(4, LEAST_DIM, dtype=dtype).unsqueeze(0).to(device)
        call = Call(
            query=zeros.unsqueeze(2),
            key=zeros,
            value=values,
            kv_heads=1,
            scale=1.0,
            kv_lengths=[4],
            mask=self._triangle(zeros.device),
            sparse_mode=BAND,
            pre_tokens=1,
            next_tokens=0,
        )
        last = self._call(call)[0][0, 3, 0, :4].float().cpu()
        seen = (last > 0.1).tolist()
        if seen not in ([False, False, True, True], [False, False, False, True]):
            raise UnsupportedError(
                "feature 'window': npu_fused_infer_attention_score in sparse mode 4 sees other keys than either "
                f"reading of its documents ({last.tolist()} of four): send this line in, run models without a window"
            )
        self._inclusive[dtype] = seen[2]

    def _pre_tokens(self, window: int, dtype: torch.dtype) -> int:
        """So many tokens before a query's own make a window of `window` with it."""
        return window - 1 if self._inclusive[dtype] else window

    def _call(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        return self._operators.attention(_checked(call))


def _checked(call: Call) -> Call:
    """The call, if it is within the operator's limits; `UnsupportedError`."""
    limits.check_attention(
        tuple(call.query.shape),
        tuple(call.key.shape),
        SPELLED[call.query.dtype],
        kv_heads=call.kv_heads,
        block_size=call.block_size,
        context=max(call.kv_lengths),
    )
    return call


def _decoding(plan: AscendPlan, heads: Heads, view: View, q: torch.Tensor, ends: bool) -> Call:
    return Call(
        query=q.unsqueeze(1),
        key=heads.part.keys,
        value=heads.part.values,
        kv_heads=heads.part.heads,
        scale=heads.spec.scale,
        kv_lengths=view.lengths,
        table=view.table,
        block_size=plan.block_size,
        mask=view.mask,
        lse=ends,
    )


def _plain(heads: Heads, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys: int, ends: bool) -> Call:
    """Every query sees every key."""
    return Call(
        query=q.unsqueeze(0),
        key=k,
        value=v,
        kv_heads=heads.part.heads,
        scale=heads.spec.scale,
        kv_lengths=[keys],
        sparse_mode=NO_MASK,
        lse=ends,
    )


def _pieces(keys: int, queries: int, most: int, size: int) -> Iterator[tuple[int, int]]:
    """(first key, keys) of each piece of a context: whole blocks up to the last, which holds the queries' own keys."""
    last = max(0, -(-(keys - most) // size)) * size
    last = min(last, (keys - queries) // size * size)
    for start in range(0, last, most):
        yield start, min(most, last - start)
    yield last, keys - last


def _merged(done: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> tuple[torch.Tensor, torch.Tensor]:
    """One softmax over the keys of all pieces."""
    logs = torch.stack([part for _, part in done if part is not None])
    total = torch.logsumexp(logs, 0)
    shares = (logs - total).exp_().unsqueeze(-1)
    return (torch.stack([piece.float() for piece, _ in done]) * shares).sum(0), total


def _alone(made: tuple[torch.Tensor, torch.Tensor], ends: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A call of one row: (result [queries, heads, dim], log-sum-exp [queries, heads])."""
    return made[0][0], made[1][0, :, :, 0].transpose(0, 1) if ends else None


def _by_row(logs: torch.Tensor) -> torch.Tensor:
    """Log-sum-exp [batch, heads] of calls of one query a row."""
    return logs[:, :, 0, 0]


def _store(
    heads: Heads,
    rows: slice | torch.Tensor,
    result: torch.Tensor,
    logs: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Sinks, and everything where it belongs."""
    spec = heads.spec
    if spec.sinks and logs is not None:
        sinks = heads.layer.sinks[heads.queries]
        result = result.float() * torch.sigmoid(logs - sinks).unsqueeze(-1)
        logs = torch.logaddexp(logs, sinks.expand_as(logs))
    out[rows, heads.queries] = result[..., : spec.v_dim].to(out.dtype)
    if lse is not None and logs is not None:
        lse[rows, heads.queries] = logs


def _own(tensor: torch.Tensor, prompt: Prompt, part: Part, wide: int) -> torch.Tensor:
    """A row's own keys, or values, of some heads: [1, count, heads * wide]."""
    mine = tensor[prompt.first : prompt.first + prompt.count, part.first : part.first + part.heads]
    return _wide(mine, wide).flatten(1).contiguous().unsqueeze(0)


def _kept(tensor: torch.Tensor, plan: AscendPlan, wide: int) -> torch.Tensor:
    return _wide(tensor if plan.kept is None else tensor.index_select(0, plan.kept), wide)


def _wide(tensor: torch.Tensor, wide: int) -> torch.Tensor:
    """With zeros behind each head's numbers up to the width of the cache."""
    missing = wide - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor
