"""Wrong numbers: which keys a query sees, how their scores and weights are made, what comes out."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tests.conformance.mutants.table import mutant

# -- which keys --------------------------------------------------------------------------------------------------------


@mutant("_visible", "window: key i is visible iff i > p - window", "test_attend.py::test_window")
def window_off_by_one(original: Any, self: Any, spec: Any, context: int, position: int) -> Any:
    """A window of w shows w + 1 keys."""
    wider = spec if spec.window is None else dataclasses.replace(spec, window=spec.window + 1)
    return original(self, wider, context, position)


@mutant("_visible", "window: key i is visible iff i > p - window", "test_attend.py::test_window", base="template")
def window_one_short(original: Any, self: Any, spec: Any, position: int, context: int) -> Any:
    """A window of w shows w - 1 keys."""
    first, end = original(self, spec, position, context)
    return (first, end) if spec.window is None else (min(first + 1, end), end)


@mutant(
    "_visible",
    "older context: a query sees keys up to its own position",
    "test_attend.py::test_attend_only_at_an_older_context",
)
def causal_ignored(original: Any, self: Any, spec: Any, context: int, position: int) -> Any:
    """Every query of a chunk sees the whole context."""
    return original(self, dataclasses.replace(spec, causal=False), context, position)


@mutant("_visible", "context: exactly the first ctx_len keys are read", "test_attend.py::test_context_around_a_block")
def context_rounded_up(original: Any, self: Any, spec: Any, context: int, position: int) -> Any:
    """The last query of a row sees one key past the context."""
    seen = original(self, spec, context, position)
    return slice(seen.start, seen.stop + (position == context - 1))


@mutant("_visible", "non-causal: every query sees the whole context", "test_attend.py::test_non_causal")
def always_causal(original: Any, self: Any, spec: Any, context: int, position: int) -> Any:
    """Layers that are declared not to be causal are causal all the same."""
    return original(self, dataclasses.replace(spec, causal=True), context, position)


@mutant("_position", "prefix hit: starting from cached blocks", "test_prefix.py::test_prefix_hit")
def cached_length_ignored(original: Any, self: Any, context: int, count: int, number: int) -> int:
    """Queries are counted from 0 instead of from the cached length (U90)."""
    return number


@mutant("_position", "multi_token_decode: decode rows hold", "test_attend.py::test_several_tokens_in_a_decode_row")
def decode_rows_of_one_position(original: Any, self: Any, context: int, count: int, number: int) -> int:
    """All queries of a short row stand at its last position."""
    return context - 1 if count <= 3 else original(self, context, count, number)


@mutant(
    "_leak", "hidden slots: NaN in unowned blocks and behind the context never leaks", "test_attend.py::test_nan_poison"
)
def nan_leaks(original: Any, self: Any, keys: Any, values: Any, seen: slice) -> float:
    """Hidden slots are multiplied by 0, which keeps their NaN."""
    hidden = np.ones(len(keys), bool)
    hidden[seen] = False
    return 0.0 * float(keys[hidden].sum() + values[hidden].sum())


@mutant("_leak", "hidden slots: large finite numbers", "test_attend.py::test_finite_poison")
def finite_numbers_leak(original: Any, self: Any, keys: Any, values: Any, seen: slice) -> float:
    """Hidden slots have a weight that is small instead of 0."""
    hidden = np.ones(len(keys), bool)
    hidden[seen] = False
    return 1e-9 * float(np.nan_to_num(values[hidden]).sum())


@mutant("_attend_token", "no visible key: the output is zero", "test_attend.py::test_nothing_visible")
def nothing_visible_divides_by_zero(
    original: Any, self: Any, layer: Any, q: Any, keys: Any, values: Any, distances: Any
) -> Any:
    """A query without a visible key gives 0 / 0."""
    out, lse = original(self, layer, q, keys, values, distances)
    return (out if len(keys) else out * np.nan), lse


# -- scores and weights ------------------------------------------------------------------------------------------------


@mutant("_softcapped", "softcap: s becomes softcap * tanh(s / softcap)", "test_attend.py::test_softcap")
def softcap_without_rescale(original: Any, self: Any, spec: Any, scores: Any) -> Any:
    """The result of tanh is not multiplied by the cap again."""
    return scores if spec.softcap is None else np.tanh(scores / spec.softcap)


@mutant("_softcapped", "softcap: s becomes softcap * tanh(s / softcap)", "test_attend.py::test_softcap")
def softcap_approximated(original: Any, self: Any, spec: Any, scores: Any) -> Any:
    """A declared feature is approximated: scores are cut off at the cap."""
    return scores if spec.softcap is None else np.clip(scores, -spec.softcap, spec.softcap)


@mutant("_scores", "scale: scores are multiplied by the layer's scale", "test_attend.py::test_scale_is_the_layers")
def default_scale(original: Any, self: Any, layer: Any, q: Any, keys: Any, distances: Any) -> Any:
    """The square root of the head dim is used instead of the layer's scale."""
    return original(self, layer, q * (layer.spec.k_dim**-0.5 / layer.spec.scale), keys, distances)


@mutant("_bias", "alibi: slope * (i - p)", "test_attend.py::test_alibi")
def alibi_left_out(original: Any, self: Any, layer: Any, distances: Any) -> float:
    """A declared feature is accepted and does nothing."""
    return 0.0


@mutant("_sink", "sinks: exp(sink) of a query head is added", "test_attend.py::test_sinks")
def sinks_left_out(original: Any, self: Any, layer: Any, top: Any) -> float:
    """Sinks are not added to the denominator."""
    return 0.0


@mutant("_weights", "sinks: exp(sink) of a query head is added", "test_attend.py::test_sinks", base="template")
def sinks_of_another_head(original: Any, self: Any, layer: Any, scores: Any) -> Any:
    """Each query head uses its neighbour's sink."""
    return original(self, layer._replace(sinks=np.roll(layer.sinks, 1, axis=0)), scores)


@mutant(
    "_weights",
    "softmax: scores far above or below zero neither overflow nor vanish",
    "test_attend.py::test_scores_far_from_zero",
    base="template",
)
def softmax_overflows(original: Any, self: Any, layer: Any, scores: Any) -> Any:
    """The largest score is not taken off before the exponential."""
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        weights = np.exp(scores)
        return weights / (weights.sum(1, keepdims=True) + np.exp(layer.sinks))


@mutant("_kv_heads", "heads: query head h reads KV head floor", "test_attend.py::test_heads_of_a_group")
def heads_repeated(original: Any, self: Any, spec: Any) -> Any:
    """KV heads are repeated as 0 1 0 1 instead of 0 0 1 1."""
    return np.arange(spec.q_heads) % spec.kv_heads


# -- which blocks ------------------------------------------------------------------------------------------------------


@mutant("_gather", "block table: a sequence's blocks are read in the order", "test_attend.py::test_order_of_blocks")
def block_order_ignored(original: Any, self: Any, layer: Any, table: Any, context: int) -> Any:
    """Blocks are read by ascending id."""
    return original(self, layer, np.sort(table), context)


@mutant(
    "_read",
    "block table: a sequence's blocks are read in the order",
    "test_attend.py::test_order_of_blocks",
    base="template",
)
def blocks_in_one_stretch(original: Any, self: Any, layer: Any, blocks: Any, context: int) -> Any:
    """The cache is read as one stretch from the first block on."""
    stretch = blocks[:1] + np.arange(len(blocks))
    return original(self, layer, stretch % len(layer.keys), context)


# -- stored, not raw ---------------------------------------------------------------------------------------------------


def _with_raw(name: str, original: Any, self: Any, plan: Any, index: int, q: Any, k: Any, v: Any, out: Any) -> None:
    """Attend over the cache in which one side still has this call's rows as they were given."""
    original(self, plan, index, q, k, v, out)
    if q is None or k is None:
        return
    layer = self._layer(plan._pool, index)
    raw = getattr(layer, name).astype(np.float32)
    kept = np.flatnonzero(plan._slots >= 0)
    raw[np.divmod(plan._slots[kept], layer.keys.shape[1])] = {"keys": k, "values": v}[name].numpy()[kept]
    for row in plan._rows:
        self._attend_row(layer._replace(**{name: raw}), row, q.numpy(), out.numpy())


@mutant(
    "attend",
    "stored: attention reads keys as stored",
    "test_append.py::test_keys_are_read_as_stored",
    base="template",
)
def raw_keys(
    original: Any, self: Any, plan: Any, layer: int, q: Any, k: Any, v: Any, out: Any, *, extra: Any = None
) -> None:
    """A call attends over its own keys before they were rounded."""
    _with_raw("keys", original, self, plan, layer, q, k, v, out)


@mutant(
    "attend",
    "stored: attention reads values as stored",
    "test_append.py::test_values_are_read_as_stored",
    base="template",
)
def raw_values(
    original: Any, self: Any, plan: Any, layer: int, q: Any, k: Any, v: Any, out: Any, *, extra: Any = None
) -> None:
    """A call attends over its own values before they were rounded."""
    _with_raw("values", original, self, plan, layer, q, k, v, out)


# -- what comes out ----------------------------------------------------------------------------------------------------


@mutant(
    "_attend", "padding: out rows past the last token stay finite", "test_append.py::test_padding_rows_of_q_and_out"
)
def out_padding_is_nan(original: Any, self: Any, plan: Any, layer: Any, q: Any, out: Any, lse: Any) -> None:
    """Rows of out past the last token become NaN."""
    original(self, plan, layer, q, out, lse)
    out[plan._now.num_tokens :] = float("nan")


@mutant(
    "_attend", "padding: out rows past the last token stay finite", "test_append.py::test_padding_rows_of_q_and_out"
)
def padding_is_attended(original: Any, self: Any, plan: Any, layer: Any, q: Any, out: Any, lse: Any) -> None:
    """Rows of q past the last token are taken for more queries of the last row."""
    tokens = plan._now.num_tokens
    original(self, plan, layer, q, out, lse)
    for row in range(tokens, len(out) if len(plan._now.tables) else tokens):
        keys, values = self._gather(layer, plan._now.tables[-1], int(plan._now.contexts[-1]))
        query = q[row].float().numpy().astype(np.float64)
        result = self._attend_token(layer, query, keys[:1], values[:1], np.zeros(1))[0]
        out[row] = out.new_tensor(result)


@mutant(
    "attend",
    "dtype: out has the pool's dtype, and q, k and v keep their values",
    "test_attend.py::test_inputs_are_never_written",
)
def input_is_scaled_in_place(
    original: Any, self: Any, plan: Any, layer: int, q: Any, k: Any, v: Any, out: Any, *, extra: Any = None
) -> None:
    """The queries are scaled where they lie."""
    original(self, plan, layer, q, k, v, out, extra=extra)
    if q is not None:
        q.mul_(plan._pool._layer(layer).spec.scale)


@mutant("_argument", "strides: q, k and v may be slices of one tensor", "test_append.py::test_slices_of_one_tensor")
def stride_taken_for_granted(original: Any, self: Any, tensor: Any, rows: int) -> Any:
    """The token stride is taken to be heads * dim."""
    _, heads, dim = tensor.shape
    return original(self, tensor.as_strided(tensor.shape, (heads * dim, dim, 1)), rows)


# -- the same bits -----------------------------------------------------------------------------------------------------

ROUNDING = 2.0**-20
"""What another order of a sum may change, of a value of about 1."""


def _row_rounded(original: Any, self: Any, layer: Any, staged: Any, row: int, *more: Any, steps: int) -> None:
    """A row whose sums come out a few roundings larger."""
    original(self, layer, staged, row, *more)
    out = more[1]
    out[int(staged.starts[row]) : int(staged.starts[row + 1])] *= 1 + steps * ROUNDING


@mutant(
    "_attend_row",
    "batch_invariant: a row's bits do not depend on its neighbours",
    "test_invariance.py::test_with_neighbours",
)
def bits_depend_on_neighbours(original: Any, self: Any, layer: Any, staged: Any, row: int, *more: Any) -> None:
    """The split of a row's sums depends on how many rows there are."""
    _row_rounded(original, self, layer, staged, row, *more, steps=int(len(staged.contexts) > 1))


@mutant(
    "_attend_row", "batch_invariant: a decode among many has the bits", "test_invariance.py::test_decode_equals_prefill"
)
def bits_of_decode_differ(original: Any, self: Any, layer: Any, staged: Any, row: int, *more: Any) -> None:
    """Rows of one query are summed otherwise than rows of several."""
    _row_rounded(original, self, layer, staged, row, *more, steps=int(staged.starts[row + 1] - staged.starts[row] == 1))


@mutant(
    "_attend_row",
    "batch_invariant: a position's bits do not depend on how the prompt is cut",
    "test_invariance.py::test_in_chunks",
)
def bits_depend_on_the_chunk(original: Any, self: Any, layer: Any, staged: Any, row: int, *more: Any) -> None:
    """The split of a row's sums depends on where its chunk begins."""
    count = int(staged.starts[row + 1] - staged.starts[row])
    _row_rounded(original, self, layer, staged, row, *more, steps=int(staged.contexts[row]) - count)


@mutant("_attend_row", "deterministic: other block ids give the same bits", "test_invariance.py::test_other_block_ids")
def bits_depend_on_ids(original: Any, self: Any, layer: Any, staged: Any, row: int, *more: Any) -> None:
    """Sums are made in the order in which blocks lie."""
    _row_rounded(original, self, layer, staged, row, *more, steps=int(staged.tables[row].sum()) % 7)


@mutant(
    "_attend_row",
    "deterministic: the same batch twice gives the same bits",
    "test_invariance.py::test_same_batch_twice",
)
def bits_depend_on_chance(original: Any, self: Any, layer: Any, staged: Any, row: int, *more: Any) -> None:
    """Sums are made in the order in which threads come."""
    _row_rounded(original, self, layer, staged, row, *more, steps=int(np.random.default_rng().integers(8)))


@mutant(
    "_attend",
    "batch_invariant: a row's bits do not depend on padding or on generous bounds",
    "test_invariance.py::test_with_padding",
)
def bits_depend_on_padding(original: Any, self: Any, plan: Any, layer: Any, q: Any, out: Any, lse: Any) -> None:
    """The split of sums depends on how many rows q has, padding included."""
    original(self, plan, layer, q, out, lse)
    if len(q) > plan._now.num_tokens:
        out.mul_(1 + ROUNDING)
