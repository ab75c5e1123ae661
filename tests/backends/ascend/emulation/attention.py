"""What npu_fused_infer_attention_score computes, in float32, one sequence at a time: emulation, never Ascend's numbers.

Keys behind a sequence's length are not read. Block ids are not checked: one that does not exist reads garbage, as on
the device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.backends.ascend.emulation.rules import INT_MAX, Call, differences, per_sequence

GARBAGE = 3e4
"""What memory that is nobody's holds, and results that no rule defines."""
HIDDEN = -3e38
"""The score of a hidden key. A query that sees none sees all alike: the documents call such a row imprecise."""

Result = tuple[torch.Tensor, torch.Tensor]


def attend(call: Call, inclusive: bool) -> Result:
    """(result in the layout of the query, float32 log-sum-exp). `inclusive`: how a band counts, see `_band`."""
    if call.layout == "TND":
        return _flat(call, inclusive)
    q = _by_head(call.query, call)
    result = torch.full((*q.shape[:3], call.dim), GARBAGE)
    lse = torch.full((*q.shape[:3], 1), GARBAGE)
    for row, (length, keys) in enumerate(_lengths(call)):
        k, v = _keys(call, row, keys)
        seen = _seen(call, row, length, keys, inclusive)
        result[row, :, :length], lse[row, :, :length] = _attention(call, q[row, :, :length], k, v, seen)
    return _as_query(result, call).to(call.query.dtype), lse if call.lse else torch.zeros(1)


def _flat(call: Call, inclusive: bool) -> Result:
    """Sequences behind each other: (T, N, D) and (T, N, 1)."""
    results, logs, at = [], [], (0, 0)
    for row, (length, keys) in enumerate(_lengths(call)):
        q, k, v = (
            tensor[start : start + count].transpose(0, 1).float()
            for tensor, start, count in (
                (call.query, at[0], length),
                (call.key, at[1], keys),
                (call.value, at[1], keys),
            )
        )
        result, lse = _attention(call, q, k, v, _seen(call, row, length, keys, inclusive))
        results.append(result.transpose(0, 1))
        logs.append(lse.transpose(0, 1))
        at = (at[0] + length, at[1] + keys)
    return torch.cat(results).to(call.query.dtype), torch.cat(logs) if call.lse else torch.zeros(1)


def _lengths(call: Call) -> Iterator[tuple[int, int]]:
    """(queries, keys) of each sequence."""
    if call.layout == "TND":
        return zip(differences(call.q_lengths or ()), differences(call.kv_lengths or ()), strict=True)
    queries = [1] * call.batch if call.queries == 1 else per_sequence(call.q_lengths, call.batch, call.queries)
    return zip(queries, per_sequence(call.kv_lengths, call.batch, call.keys), strict=True)


def _attention(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None) -> Result:
    """q [heads, queries, dim], k and v [KV heads, keys, dim], seen [queries, keys]: (result, log-sum-exp [.., 1])."""
    heads, queries = q.shape[:2]
    if not k.shape[1]:
        return torch.zeros(heads, queries, v.shape[-1]), torch.full((heads, queries, 1), -torch.inf)
    grouped = q.reshape(len(k), -1, q.shape[-1])
    scores = (grouped @ k.transpose(1, 2)).view(heads, queries, -1) * call.scale
    if seen is not None:
        scores = scores.masked_fill(~seen, HIDDEN)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    result = ((scores - lse).exp().view(len(k), -1, k.shape[1]) @ v).view(heads, queries, -1)
    if seen is not None and call.inner_precise >= 2:
        result = result.masked_fill(~seen.any(-1)[:, None], 0.0)
    return result, lse


# -- layouts -----------------------------------------------------------------------------------------------------------


def _by_head(tensor: torch.Tensor, call: Call) -> torch.Tensor:
    """float32 [batch, heads, tokens, dim]."""
    if call.layout == "BNSD":
        return tensor.float()
    return tensor.view(*tensor.shape[:2], -1, call.dim).transpose(1, 2).float()


def _as_query(result: torch.Tensor, call: Call) -> torch.Tensor:
    """[batch, heads, tokens, dim] in the layout of the query."""
    if call.layout == "BNSD":
        return result
    return result.transpose(1, 2).reshape(call.query.shape)


def _keys(call: Call, row: int, keys: int) -> tuple[torch.Tensor, ...]:
    """float32 [KV heads, keys, dim] of a sequence's keys, and of its values."""
    if call.table is None:
        return tuple(_by_head(tensor[row : row + 1], call)[0, :, :keys] for tensor in (call.key, call.value))
    ids = call.table[row, : -(-keys // call.block_size)].long()
    return tuple(_blocks(call, tensor, ids)[:, :keys] for tensor in (call.key, call.value))


def _blocks(call: Call, cache: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """float32 [KV heads, keys, dim] of some blocks."""
    there = (ids >= 0) & (ids < len(cache))
    found = cache[torch.where(there, ids, 0)].float()
    found[~there] = GARBAGE
    if cache.dim() == 3:
        return found.view(-1, call.kv_heads, call.dim).transpose(0, 1)
    return found.transpose(0, 1).flatten(1, 2)


# -- what a query sees -------------------------------------------------------------------------------------------------


def _seen(call: Call, row: int, length: int, keys: int, inclusive: bool) -> torch.Tensor | None:
    """bool [queries, keys] of a sequence; None: everything."""
    if call.queries == 1 and call.layout != "TND":
        return None if call.mask is None else ~_mask_of(call, row, 1, keys)
    if call.sparse_mode == 0 and call.mask is None:
        return None
    if call.sparse_mode == 1:
        return ~_mask_of(call, row, length, keys)
    if call.sparse_mode == 0:
        return _band(length, keys, 0, call.pre_tokens, call.next_tokens, True) & ~_mask_of(call, row, length, keys)
    if call.sparse_mode == 2:
        return _band(length, keys, 0, INT_MAX, 0, True)
    if call.sparse_mode == 3:
        return _band(length, keys, keys - length, INT_MAX, 0, True)
    return _band(length, keys, keys - length, call.pre_tokens, call.next_tokens, inclusive)


def _band(length: int, keys: int, offset: int, before: int, behind: int, inclusive: bool) -> torch.Tensor:
    """Keys from `before` tokens before a query's own to `behind` tokens after it.

    Not `inclusive`: the query's own is one of the tokens before. `offset`: the key of the first query.
    """
    own, key = torch.arange(length)[:, None] + offset, torch.arange(keys)
    first = own - before if inclusive else own - before + 1
    return (key >= first) & (key <= own + behind)


def _mask_of(call: Call, row: int, length: int, keys: int) -> torch.Tensor:
    """bool [queries, keys] of a sequence: 1 hides."""
    mask = torch.zeros(length, keys, dtype=torch.int8) if call.mask is None else call.mask
    if call.queries == 1:
        return mask.view(call.batch, 1, -1)[row, :, :keys].bool()
    whole = mask.view(-1, *mask.shape[-2:])
    return whole[row if len(whole) > 1 else 0, :length, :keys].bool()
