"""The emulated operators: numbers against float64, and every rule of the documents refused with its name.

This is about the emulation, which other tests lean on, not about Ascend.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends.ascend.emulation import operators, rules
from tests.backends.ascend.emulation.rules import Call

FOLDER = Path(operators.__file__).parent
HEADS, KV_HEADS, DIM, SCALE = 4, 2, 16, 0.25
TRIANGLE = torch.ones(2048, 2048, dtype=torch.int8).triu_(1)
V1: dict[str, Any] = {"num_heads": HEADS, "num_key_value_heads": KV_HEADS, "scale": SCALE}
V2: dict[str, Any] = {"num_query_heads": HEADS, "num_key_value_heads": KV_HEADS, "softmax_scale": SCALE}


@pytest.fixture(autouse=True)
def installed() -> None:
    operators.install()


def half(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).half()


def fia(*tensors: torch.Tensor, **named: Any) -> Any:
    """npu_fused_infer_attention_score of BSH tensors, with the heads of this file."""
    return torch.ops.npu.npu_fused_infer_attention_score(*tensors, **(V1 | named))


def fia_v2(*tensors: torch.Tensor, **named: Any) -> Any:
    return torch.ops.npu.npu_fused_infer_attention_score_v2(*tensors, **(V2 | named))


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention of q [queries, H] on k, v [keys, H], seen [queries, keys]: ([queries, H], [heads, queries])."""
    queries, keys = (tensor.double().view(len(tensor), -1, DIM) for tensor in (q, k))
    values, ratio = v.double().view(len(v), -1, DIM), queries.shape[1] // keys.shape[1]
    results, logs = [], []
    for head in range(queries.shape[1]):
        scores = queries[:, head] @ keys[:, head // ratio].T * SCALE
        scores = scores.masked_fill(~seen, -torch.inf)
        results.append(torch.softmax(scores, -1) @ values[:, head // ratio])
        logs.append(torch.logsumexp(scores, -1))
    return torch.stack(results, 1).flatten(1), torch.stack(logs)


def close(made: torch.Tensor, wanted: torch.Tensor, tolerance: float = 2e-3) -> bool:
    return torch.allclose(made.double(), wanted, atol=tolerance, rtol=tolerance)


def everything(queries: int, keys: int) -> torch.Tensor:
    return torch.ones(queries, keys, dtype=torch.bool)


# -- numbers -----------------------------------------------------------------------------------------------------------


def paged(rows: list[int], size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(keys, values, table) of sequences in scattered blocks; what no sequence owns is NaN."""
    counts = [-(-length // size) for length in rows]
    keys, values = (torch.full((sum(counts) + 2, size, KV_HEADS * DIM), torch.nan).half() for _ in "kv")
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(5)) + 1
    table = torch.full((len(rows), max(counts)), 7777, dtype=torch.int32)
    for row, (length, ids) in enumerate(zip(rows, order.split(counts), strict=True)):
        table[row, : len(ids)] = ids
        for cache, seed in ((keys, 10 + row), (values, 20 + row)):
            mine = half(len(ids) * size, KV_HEADS * DIM, seed=seed)
            mine[length:] = torch.nan
            cache[ids] = mine.view(len(ids), size, -1)
    return keys, values, table


def of_row(cache: torch.Tensor, table: torch.Tensor, row: int, length: int) -> torch.Tensor:
    ids = table[row, : -(-length // cache.shape[1])].long()
    return cache[ids].flatten(0, 1)[:length]


@pytest.mark.parametrize("call", [fia, fia_v2])
@pytest.mark.parametrize("size", [16, 32, 512])
def test_decode_reads_its_blocks_up_to_each_length(call: Callable[..., Any], size: int) -> None:
    """Neither what lies behind a length nor columns behind it are read."""
    rows, one = [1, 33, 47], call is fia
    keys, values, table = paged(rows, size)
    q = half(3, 1, HEADS * DIM)
    lengths = {"actual_seq_lengths_kv" if one else "actual_seq_kvlen": rows}
    wanted = {"softmax_lse_flag" if one else "return_softmax_lse": True}
    out, lse = call(q, keys, values, block_table=table, block_size=size, sparse_mode=3, **lengths, **wanted)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert lse.shape == (3, HEADS, 1, 1) and lse.dtype == torch.float32
    for row, length in enumerate(rows):
        mine = (of_row(cache, table, row, length) for cache in (keys, values))
        result, logs = exact(q[row], *mine, everything(1, length))
        assert close(out[row], result) and close(lse[row, :, :, 0], logs)


@pytest.mark.parametrize("shape", [(2, 64), (2, 1, 64), (2, 1, 1, 64)])
def test_a_mask_holds_where_there_is_one_query(shape: tuple[int, ...]) -> None:
    rows, hidden = [40, 50], torch.zeros(2, 64, dtype=torch.int8)
    hidden[0, :9], hidden[1, 3:30] = 1, 1
    keys, values, table = paged(rows, 32)
    q = half(2, 1, HEADS * DIM)
    paging = {"block_table": table, "block_size": 32, "actual_seq_lengths_kv": rows}
    out, lse = fia(q, keys, values, atten_mask=hidden.view(shape), pre_tokens=1, next_tokens=0, **paging)
    for row, length in enumerate(rows):
        mine = (of_row(cache, table, row, length) for cache in (keys, values))
        assert close(out[row], exact(q[row], *mine, ~hidden[row : row + 1, :length].bool())[0])
    assert lse.shape == (1,) and float(lse) == 0


def bands(queries: int, keys: int) -> dict[str, tuple[dict[str, Any], torch.Tensor]]:
    """Sparse modes and what they leave to see; places are counted from the lower right but in 0 and 2."""
    at, key = torch.arange(queries)[:, None], torch.arange(keys)
    own = at + keys - queries
    whole = (at * 7 + key) % 3 == 0
    whole[:, 0] = False
    return {
        "default": ({"sparse_mode": 0, "pre_tokens": 1, "next_tokens": 0}, everything(queries, keys)),
        "masked": ({"sparse_mode": 0, "atten_mask": whole}, ~whole),
        "left band": (
            {"sparse_mode": 0, "atten_mask": whole, "pre_tokens": 4, "next_tokens": 2},
            ~whole & (key >= at - 4) & (key <= at + 2),
        ),
        "all": ({"sparse_mode": 1, "atten_mask": whole, "pre_tokens": 0, "next_tokens": 0}, ~whole),
        "left up": ({"sparse_mode": 2, "atten_mask": TRIANGLE}, key <= at),
        "right down": ({"sparse_mode": 3, "atten_mask": TRIANGLE, "pre_tokens": 0, "next_tokens": 9}, key <= own),
        "band": (
            {"sparse_mode": 4, "atten_mask": TRIANGLE, "pre_tokens": 3, "next_tokens": 1},
            (key >= own - 3) & (key <= own + 1),
        ),
    }


@pytest.mark.parametrize("mode", bands(1, 1))
@pytest.mark.parametrize("layout", ["BSH", "BSND", "BNSD"])
def test_sparse_modes(mode: str, layout: str) -> None:
    queries, keys = 6, 11
    named, seen = bands(queries, keys)[mode]
    seen = seen & (torch.arange(keys) >= 0)
    if mode == "left band":
        seen[0, 1] = True  # a row that sees nothing is documented as imprecise
        named["atten_mask"] = named["atten_mask"] & ~seen
    q, k, v = (
        half(1, queries, HEADS * DIM),
        half(1, keys, KV_HEADS * DIM, seed=1),
        half(1, keys, KV_HEADS * DIM, seed=2),
    )
    given = [in_layout(tensor, layout) for tensor in (q, k, v)]
    out, lse = fia(*given, input_layout=layout, softmax_lse_flag=True, **named)
    result, logs = exact(q[0], k[0], v[0], seen)
    assert out.shape == given[0].shape and lse.shape == (1, HEADS, queries, 1)
    assert close(out, in_layout(result[None], layout)) and close(lse[0, :, :, 0], logs)


def in_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor in BSH in another layout."""
    if layout == "BSH":
        return tensor
    apart = tensor.view(*tensor.shape[:2], -1, DIM)
    return apart if layout == "BSND" else apart.transpose(1, 2).contiguous()


@pytest.mark.parametrize("inclusive", [True, False])
def test_a_band_is_counted_as_the_options_say(inclusive: bool) -> None:
    """pre_tokens 2: the query's own key and two before it, or the own one among the two."""
    q, k, v = torch.zeros(1, 5, 64).half(), torch.zeros(1, 5, 32).half(), torch.eye(5, 32).half()[None]
    with operators.emulated(inclusive=inclusive):
        out, _ = fia(q, k, v, sparse_mode=4, atten_mask=TRIANGLE, pre_tokens=2, next_tokens=0)
    assert (out[0, 4, :5] > 0.1).tolist() == [False, False, inclusive, True, True]


def test_prompts_through_the_block_table_have_their_own_lengths() -> None:
    rows, counts = [300, 130], [7, 3]
    keys, values, table = paged(rows, 128)
    q = half(2, 7, HEADS * DIM)
    named = {"actual_seq_lengths": counts, "actual_seq_lengths_kv": rows, "block_table": table, "block_size": 128}
    out, lse = fia(q, keys, values, sparse_mode=3, atten_mask=TRIANGLE, softmax_lse_flag=True, **named)
    for row, (length, count) in enumerate(zip(rows, counts, strict=True)):
        mine = (of_row(cache, table, row, length) for cache in (keys, values))
        seen = torch.arange(length) <= torch.arange(count)[:, None] + length - count
        result, logs = exact(q[row, :count], *mine, seen)
        assert close(out[row, :count], result) and close(lse[row, :, :count, 0], logs)
    assert (out[1, 3:] > 1e4).all(), "queries behind a length have no result"


def test_the_other_layout_of_a_cache_gives_the_same_bits() -> None:
    keys, values, table = paged([40, 20], 32)
    q = half(2, HEADS, 1, DIM)
    named = {"input_layout": "BNSD", "actual_seq_lengths_kv": [40, 20], "block_table": table, "block_size": 32}
    turned = [cache.view(-1, 32, KV_HEADS, DIM).transpose(1, 2).contiguous() for cache in (keys, values)]
    assert torch.equal(fia(q, keys, values, **named)[0], fia(q, *turned, **named)[0])


def test_sequences_behind_each_other_in_tnd() -> None:
    counts, lengths = [2, 3], [5, 4]
    q, k, v = (torch.randn(n, 2, 128).bfloat16() for n in (5, 9, 9))
    named = {"input_layout": "TND", "actual_seq_qlen": [2, 5], "actual_seq_kvlen": [5, 9], "return_softmax_lse": True}
    named |= {"num_query_heads": 2, "softmax_scale": 0.1}
    out, lse = fia_v2(q, k, v, sparse_mode=3, atten_mask=TRIANGLE, **named)
    assert out.shape == q.shape and lse.shape == (5, 2, 1)
    at = [0, 0]
    for count, length in zip(counts, lengths, strict=True):
        mine, keys, values = q[at[0] :][:count], k[at[1] :][:length], v[at[1] :][:length]
        scores = torch.einsum("qhd,khd->hqk", mine.double(), keys.double()) * 0.1
        hidden = torch.arange(length) > torch.arange(count)[:, None] + length - count
        scores = scores.masked_fill(hidden, -torch.inf)
        wanted = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), values.double())
        assert close(out[at[0] :][:count], wanted, 2e-2)
        assert close(lse[at[0] :][:count, :, 0], torch.logsumexp(scores, -1).T)
        at = [at[0] + count, at[1] + length]


def test_a_sequence_without_keys_gives_zeros() -> None:
    keys, values, table = paged([40, 20], 32)
    named = {"block_table": table, "block_size": 32, "actual_seq_lengths_kv": [0, 20], "softmax_lse_flag": True}
    out, lse = fia(half(2, 1, HEADS * DIM), keys, values, **named)
    assert (out[0] == 0).all() and lse[0].isneginf().all() and out[1].isfinite().all()


@pytest.mark.parametrize("id", [-1, 5, 2147483647])
def test_a_block_that_does_not_exist_reads_garbage_and_says_nothing(id: int) -> None:
    keys, values, table = paged([40, 20], 32)
    q, named = half(2, 1, HEADS * DIM), {"block_size": 32, "actual_seq_lengths_kv": [40, 20]}
    right, _ = fia(q, keys, values, block_table=table, **named)
    table[0, 1] = id
    wrong, _ = fia(q, keys, values, block_table=table, **named)
    assert wrong.isfinite().all() and wrong[0].abs().max() > 1e3
    assert torch.equal(wrong[1], right[1])


def test_rows_that_a_mask_hides_are_zero_with_the_correction_alone() -> None:
    q, k, v = half(1, 3, HEADS * DIM), half(1, 5, KV_HEADS * DIM), half(1, 5, KV_HEADS * DIM)
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[1] = True
    for precise, zero in ((0, False), (2, True)):
        out, _ = fia(q, k, v, sparse_mode=1, atten_mask=mask, inner_precise=precise)
        assert bool((out[0, 1] == 0).all()) == zero and out[0, ::2].any()


@pytest.mark.parametrize("lse", [True, False])
def test_the_form_with_out_writes_there_and_wants_its_workspace(lse: bool) -> None:
    keys, values, table = paged([40, 20], 32)
    q = half(2, 1, HEADS * DIM)
    named = V1 | {"block_table": table, "block_size": 32, "actual_seq_lengths_kv": [40, 20], "softmax_lse_flag": lse}
    workspace = torch.ops.npu._npu_fused_infer_attention_score_get_max_workspace(q, keys, values, **named)
    out = [torch.empty_like(q), torch.empty((2, HEADS, 1, 1) if lse else (1,))]
    operator = torch.ops.npu.npu_fused_infer_attention_score
    operator.out(q, keys, values, **named, workspace=workspace, out=out)
    for made, wanted in zip(out, operator(q, keys, values, **named), strict=True):
        assert torch.equal(made, wanted)
    with pytest.raises(RuntimeError, match="workspace"):
        operator.out(q, keys, values, **named, workspace=workspace[:64], out=out)
    with pytest.raises(RuntimeError, match="out"):
        operator.out(q, keys, values, **named, workspace=workspace, out=[out[0], torch.empty(7)])


# -- what is refused ---------------------------------------------------------------------------------------------------


def meta(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def dense(**changes: Any) -> Call:
    """A call of two sequences of five queries and nine keys, which the documents allow."""
    fields: dict[str, Any] = {
        "version": 1,
        "query": meta(2, 5, HEADS * DIM),
        "key": meta(2, 9, KV_HEADS * DIM),
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "scale": SCALE,
        "layout": "BSH",
        "q_lengths": None,
        "kv_lengths": None,
        "table": None,
        "block_size": 0,
        "mask": None,
        "sparse_mode": 0,
        "pre_tokens": 5,
        "next_tokens": 5,
        "inner_precise": 0,
        "lse": False,
    }
    fields |= changes
    return Call(**({"value": fields["key"]} | fields))


def blocks(size: int = 128, queries: int = 5, **changes: Any) -> Call:
    """The same through a block table."""
    table = meta(2, 3, dtype=torch.int32)
    fields: dict[str, Any] = {
        "query": meta(2, queries, HEADS * DIM),
        "key": meta(7, size, KV_HEADS * DIM),
        "table": table,
    }
    fields |= {"block_size": size}
    return dense(**(fields | {"kv_lengths": [size + 1, 3]} | changes))


def tnd(**changes: Any) -> Call:
    """Two sequences behind each other, which the documents allow of version 2."""
    fields: dict[str, Any] = {"version": 2, "layout": "TND", "q_lengths": [2, 5], "kv_lengths": [5, 9]}
    fields |= {"query": meta(5, HEADS, 128, dtype=torch.bfloat16), "key": meta(9, KV_HEADS, 128, dtype=torch.bfloat16)}
    return dense(**(fields | changes))


ALLOWED: dict[str, Callable[[], Call]] = {
    "dense": dense,
    "one length for all": lambda: dense(q_lengths=[5], kv_lengths=[9]),
    "more lengths than sequences": lambda: dense(kv_lengths=[9, 9, 100]),
    "blocks of 128": blocks,
    "blocks of 512": lambda: blocks(512),
    "blocks of 16, one query": lambda: blocks(16, 1),
    "any sparse mode, one query": lambda: blocks(32, 1, sparse_mode=7),
    "mask of one query": lambda: blocks(32, 1, mask=meta(2, 96, dtype=torch.bool)),
    "mask as wide as the blocks in use": lambda: blocks(32, 1, mask=meta(2, 64, dtype=torch.uint8)),
    "mask rounded up": lambda: dense(mask=meta(2, 1, 16, 16, dtype=torch.int8)),
    "triangle": lambda: dense(sparse_mode=3, mask=meta(1, 1, 2048, 2048, dtype=torch.bool)),
    "64 heads to one": lambda: dense(query=meta(2, 5, 64 * DIM), key=meta(2, 9, DIM), heads=64, kv_heads=1),
    "widest cache": lambda: blocks(heads=255, kv_heads=255, query=meta(2, 5, 65280), key=meta(7, 128, 65280)),
    "tnd": tnd,
    "tnd, causal": lambda: tnd(sparse_mode=3, mask=meta(2048, 2048, dtype=torch.int8)),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_the_documents_allow_passes(name: str) -> None:
    rules.check(ALLOWED[name]())


REFUSED: dict[str, tuple[Callable[[], Call], str]] = {
    "unknown layout": (lambda: dense(layout="SBH"), "unknown input_layout SBH"),
    "layout that changes": (lambda: dense(layout="BNSD_BSND"), "BNSD_BSND is documented, but not emulated"),
    "dimensions": (lambda: dense(layout="BSND"), "a query of 3 dimensions in BSND"),
    "float32": (lambda: dense(query=meta(2, 5, 64, dtype=torch.float32)), "query of torch.float32"),
    "int8 keys": (lambda: dense(key=meta(2, 9, 32, dtype=torch.int8)), "int8 keys need their scales"),
    "other dtype": (lambda: dense(key=meta(2, 9, 32, dtype=torch.bfloat16)), "key of torch.bfloat16"),
    "other values": (lambda: dense(value=meta(2, 8, 32)), "unlike value"),
    "query in slices": (lambda: dense(query=meta(2, 5, 128)[..., :64]), "query is not contiguous"),
    "keys in slices": (lambda: dense(key=meta(2, 9, 64)[..., :32]), "key is not contiguous"),
    "elements": (lambda: blocks(key=meta(1 << 20, 128, 32)), "elements, which do not fit int32"),
    "257 heads": (lambda: dense(query=meta(2, 5, 257 * 16), heads=257, kv_heads=257), "257 heads on 257: 1 to 256"),
    "uneven": (lambda: dense(query=meta(2, 5, 96), heads=6, kv_heads=4), "cannot share 4 evenly"),
    "65 to one": (lambda: dense(query=meta(2, 5, 65 * 16), heads=65, kv_heads=1), "at most 64 to one"),
    "head dim 24": (lambda: dense(query=meta(2, 5, 96)), "head dim 24"),
    "head dim 528": (lambda: dense(query=meta(2, 5, 4 * 528)), "head dim 528"),
    "H": (lambda: dense(query=meta(2, 5, 66)), "H 66 is no multiple of 4 heads"),
    "heads of the shape": (lambda: dense(layout="BNSD", query=meta(2, 8, 5, 16)), "the query has 8"),
    "batch": (lambda: dense(query=meta(65537, 1, 64), key=meta(65537, 1, 32)), "a batch of 65537"),
    "shape of keys": (lambda: dense(key=meta(2, 9, 64)), r"key \(2, 9, 64\), not \(2, 9, 32\)"),
    "size without a table": (lambda: dense(block_size=128), "a block_size without a block_table"),
    "size 24": (lambda: blocks(24, 1), "block_size 24: multiples of 16 up to 512"),
    "size 528": (lambda: blocks(528, 1), "block_size 528"),
    "size 32 for prompts": (lambda: blocks(32), "block_size 32: 128 to 512 in steps of 128 where Q_S > 1"),
    "size 640 for prompts": (lambda: blocks(640), "block_size 640"),
    "size 192 for prompts": (lambda: blocks(192), "block_size 192"),
    "no lengths": (lambda: blocks(kv_lengths=None), "must be given with a block_table"),
    "table of int64": (lambda: blocks(table=meta(2, 3, dtype=torch.int64)), "block_table of torch.int64"),
    "table of one row": (lambda: blocks(table=meta(1, 3, dtype=torch.int32)), r"block_table \(1, 3\): \(2, blocks\)"),
    "flat table": (lambda: blocks(table=meta(6, dtype=torch.int32), queries=1), "block_table"),
    "few columns": (lambda: blocks(kv_lengths=[385, 3]), "3 columns of 128 tokens for 385 keys"),
    "cache": (lambda: blocks(key=meta(7, 64, 32)), r"cache \(7, 64, 32\): \(blocks, 128, 32\)"),
    "cache by heads": (lambda: blocks(key=meta(7, 2, 128, 16)), "BSH takes"),
    "cache by heads in BNSD": (
        lambda: blocks(layout="BNSD", query=meta(2, 4, 5, 16), key=meta(7, 128, 2, 16)),
        r"cache \(7, 128, 2, 16\)",
    ),
    "width": (
        lambda: blocks(heads=256, kv_heads=256, query=meta(2, 5, 65536), key=meta(7, 128, 65536)),
        "are 65536, at most 65535",
    ),
    "number of lengths": (lambda: dense(query=meta(3, 5, 64), key=meta(3, 9, 32), kv_lengths=[1, 2]), "2 lengths"),
    "negative keys": (lambda: dense(kv_lengths=[-1, 2]), "negative length of keys"),
    "more keys than there are": (lambda: dense(kv_lengths=[10, 2]), "10 keys of a sequence, with room for 9"),
    "long decode": (
        lambda: dense(query=meta(1, 1, 64), key=meta(1, 262145, 32)),
        "262145 keys, at most 262144 where Q_S is 1",
    ),
    "negative queries": (lambda: dense(q_lengths=[-1, 2]), "negative length of queries"),
    "more queries than there are": (lambda: dense(q_lengths=[6, 2]), "6 queries of a sequence, Q_S is 5"),
    "long prompt": (lambda: dense(query=meta(1, 5, 64), key=meta(1, 20971521, 32)), "S 20971521, at most 20971520"),
    "precision": (lambda: dense(inner_precise=4), "inner_precise 4"),
    "precision of one query": (lambda: blocks(32, 1, inner_precise=2), r"inner_precise 2: one of \(0, 1\)"),
    "mask of half": (lambda: dense(mask=meta(5, 9)), "atten_mask of torch.float16"),
    "mask in slices": (lambda: dense(mask=meta(5, 18, dtype=torch.int8)[:, :9]), "atten_mask is not contiguous"),
    "sparse mode 5": (lambda: dense(sparse_mode=5), "sparse_mode 5: 0 to 4"),
    "sparse mode -1": (lambda: dense(sparse_mode=-1), "sparse_mode -1"),
    "all without a mask": (lambda: dense(sparse_mode=1), "sparse_mode 1 needs the whole atten_mask"),
    "causal without a mask": (lambda: dense(sparse_mode=3), "sparse_mode 3 needs an atten_mask"),
    "small triangle": (lambda: dense(sparse_mode=4, mask=meta(5, 9, dtype=torch.bool)), "2048 x 2048"),
    "whole mask": (lambda: dense(mask=meta(3, 5, 9, dtype=torch.bool)), r"atten_mask \(3, 5, 9\) in sparse_mode 0"),
    "narrow mask": (lambda: dense(mask=meta(5, 8, dtype=torch.bool)), r"atten_mask \(5, 8\)"),
    "triangle for one query": (lambda: blocks(32, 1, mask=meta(2048, 2048, dtype=torch.int8)), "where Q_S is 1"),
    "narrow mask of one query": (lambda: blocks(32, 1, mask=meta(2, 40, dtype=torch.int8)), r"atten_mask \(2, 40\)"),
    "triangle upside down": (lambda: dense(sparse_mode=3, mask=TRIANGLE.T.contiguous()), "not 1 above its diagonal"),
    "triangle with its diagonal": (
        lambda: dense(sparse_mode=3, mask=torch.ones(2048, 2048).triu().bool()),
        "not 1 above",
    ),
    "tnd with pages": (
        lambda: tnd(table=meta(2, 3, dtype=torch.int32), block_size=128),
        "TND takes no page attention",
    ),
    "tnd of float16": (lambda: tnd(query=meta(5, 4, 128), key=meta(9, 2, 128)), "TND takes bfloat16 only"),
    "tnd, version 1": (lambda: tnd(version=1), "head dims"),
    "tnd, version 1, grouped": (
        lambda: tnd(version=1, query=meta(5, 4, 192, dtype=torch.bfloat16), key=meta(9, 2, 192, dtype=torch.bfloat16)),
        "as many KV heads as heads",
    ),
    "tnd of 64": (
        lambda: tnd(query=meta(5, 4, 64, dtype=torch.bfloat16), key=meta(9, 2, 64, dtype=torch.bfloat16)),
        "head dims",
    ),
    "tnd heads": (lambda: tnd(key=meta(9, 4, 128, dtype=torch.bfloat16)), "key has 4 heads, not 2"),
    "tnd without lengths": (lambda: tnd(kv_lengths=None), "TND needs the lengths"),
    "tnd lengths that fall": (lambda: tnd(q_lengths=[5, 2]), "never fall"),
    "tnd lengths of fewer": (lambda: tnd(q_lengths=[5]), "1 and 2 lengths"),
    "tnd lengths not to the end": (lambda: tnd(kv_lengths=[5, 8]), "the last length must be T"),
    "tnd band": (lambda: tnd(sparse_mode=4, mask=TRIANGLE), "sparse_mode 4: TND"),
    "tnd mask": (lambda: tnd(mask=TRIANGLE), "no mask in sparse_mode 0"),
    "tnd, as many queries as keys": (
        lambda: tnd(sparse_mode=3, mask=TRIANGLE, kv_lengths=[2, 9]),
        "fewer queries than keys",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_documents_refuse_is_refused_by_its_rule(name: str) -> None:
    make, rule = REFUSED[name]
    with pytest.raises(RuntimeError, match=f"emulated operator: .*{rule}"):
        rules.check(make())


@pytest.mark.parametrize(
    "named",
    [
        {"pse_shift": torch.ones(1)},
        {"query_rope": torch.ones(3)},
        {"antiquant_scale": torch.ones(1)},
        {"key_shared_prefix": torch.ones(1)},
        {"key_antiquant_mode": 1},
        {"kv_padding_size": torch.ones(1)},
    ],
    ids=lambda named: next(iter(named)),
)
def test_features_that_are_not_emulated_are_refused(named: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=f"{next(iter(named))} is documented, but not emulated"):
        fia(half(1, 3, 64), half(1, 3, 32), half(1, 3, 32), **named)
    with pytest.raises(RuntimeError, match="learnable_sink is documented"):
        fia_v2(half(1, 3, 64), half(1, 3, 32), half(1, 3, 32), learnable_sink=torch.ones(4))


# -- caches ------------------------------------------------------------------------------------------------------------


def test_scatter_writes_slots_of_caches_in_nd_order_and_nothing_else() -> None:
    k, v = half(3, 2, 16, seed=1), half(3, 2, 32, seed=2)
    keys, values = torch.zeros(2, 4, 2, 16).half(), torch.zeros(2, 4, 2, 32).half()
    slots = torch.tensor([5, 0, 7])
    torch.ops.npu.npu_scatter_pa_kv_cache(k, v, keys, values, slots, cache_mode="Norm")
    for cache, new in ((keys, k), (values, v)):
        wanted = torch.zeros_like(cache)
        for token, slot in enumerate(slots.tolist()):
            wanted[slot // 4, slot % 4] = new[token]
        assert torch.equal(cache, wanted)


def test_scatter_writes_nz_order_unless_told_otherwise() -> None:
    """Numbers of a token lie 32 bytes here and 32 bytes there: column c of a block holds numbers 16 c to 16 c + 15."""
    k = half(2, 2, 32)
    keys, values = torch.zeros(2, 4, 4, 16).half(), torch.zeros(2, 4, 4, 16).half()
    torch.ops.npu.npu_scatter_pa_kv_cache(k, k, keys, values, torch.tensor([6, 1], dtype=torch.int32))
    for token, (block, at) in enumerate(((1, 2), (0, 1))):
        assert torch.equal(keys[block, :, at].flatten(), k[token].flatten())
    assert torch.equal(keys, values) and int((keys != 0).sum()) <= 128


def test_the_older_operator_writes_the_same() -> None:
    k, slots = half(3, 2, 16), torch.tensor([5, 0, 7], dtype=torch.int32)
    one, other = ([torch.zeros(2, 4, 2, 16).half() for _ in "kv"] for _ in range(2))
    torch.ops.npu.npu_scatter_pa_kv_cache(k, k, *one, slots, cache_mode="Norm")
    torch.ops.atb._npu_reshape_and_cache(k, k, *other, slots)
    assert all(map(torch.equal, one, other))
    with pytest.raises(RuntimeError, match="slot_indices of"):
        torch.ops.atb._npu_reshape_and_cache(k, k, *other, slots.long())


BAD_APPENDS: dict[str, tuple[dict[str, Any], str]] = {
    "negative": ({"slot_mapping": torch.tensor([0, -1, 2])}, "slot -1 is negative"),
    "beyond": ({"slot_mapping": torch.tensor([0, 8, 2])}, "slot 8 of a cache with 8"),
    "twice": ({"slot_mapping": torch.tensor([3, 1, 3])}, "a slot is there twice"),
    "slots of float": ({"slot_mapping": torch.ones(3)}, "slot_mapping of torch.float32"),
    "fewer slots": ({"slot_mapping": torch.tensor([1, 2])}, r"\(2,\) slots for 3 tokens"),
    "keys in slices": ({"key": half(3, 4, 16)[:, :2]}, "key is not contiguous"),
    "caches in slices": ({"value_cache": half(2, 4, 4, 16)[:, :, :2]}, "value_cache is not contiguous"),
    "dtype": ({"value": half(3, 2, 16).float()}, "value of torch.float32"),
    "heads": ({"value": half(3, 1, 16)}, "unlike value"),
    "cache": ({"key_cache": half(2, 4, 2, 32)}, "in ND order for"),
    "flat cache": ({"key_cache": half(2, 4, 32)}, "a cache of 3 dimensions"),
    "mode": ({"cache_mode": "ND"}, "unknown cache_mode ND"),
    "trap": ({"cache_mode": "PA_NZ"}, "in NZ order for"),
    "compressed": ({"seq_lens": torch.ones(3)}, "seq_lens is documented, but not emulated"),
    "sequences": ({"key": half(3, 1, 2, 16), "value": half(3, 1, 2, 16)}, r"\(tokens, heads, dim\)"),
}


@pytest.mark.parametrize("name", BAD_APPENDS)
def test_what_scatter_refuses(name: str) -> None:
    changes, rule = BAD_APPENDS[name]
    given: dict[str, Any] = {"key": half(3, 2, 16), "value": half(3, 2, 16), "slot_mapping": torch.tensor([0, 1, 2])}
    given |= {"key_cache": half(2, 4, 2, 16), "value_cache": half(2, 4, 2, 16), "cache_mode": "Norm"} | changes
    with pytest.raises(RuntimeError, match=rule):
        torch.ops.npu.npu_scatter_pa_kv_cache(**given)


# -- fused ops ---------------------------------------------------------------------------------------------------------


def test_rms_norm() -> None:
    x, gamma = half(3, 2, 16), half(16, seed=1)
    made, inverse = torch.ops.npu.npu_rms_norm(x, gamma, 1e-5)
    wanted = (x.double().square().mean(-1, keepdim=True) + 1e-5) ** -0.5
    assert made.dtype == x.dtype and inverse.shape == (3, 2, 1) and inverse.dtype == torch.float32
    assert close(made, x.double() * wanted * gamma.double()) and close(inverse, wanted, 1e-5)
    with pytest.raises(RuntimeError, match="gamma"):
        torch.ops.npu.npu_rms_norm(x, half(8))


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul(mode: str) -> None:
    """A pair of numbers is a complex one, turned by its angle."""
    x, angles = half(1, 5, 3, 8), torch.linspace(0, 3, 20).view(1, 5, 1, 4)
    both = torch.cat((angles, angles), -1) if mode == "half" else angles.repeat_interleave(2, -1)
    made = torch.ops.npu.npu_rotary_mul(x, both.cos().half(), both.sin().half(), mode)
    pairs = x.double().chunk(2, -1) if mode == "half" else (x.double()[..., ::2], x.double()[..., 1::2])
    turned = torch.complex(*pairs) * torch.polar(torch.ones(()).double(), angles.double())
    parts = (turned.real, turned.imag)
    wanted = torch.cat(parts, -1) if mode == "half" else torch.stack(parts, -1).flatten(-2)
    assert close(made, wanted, 5e-3)


BAD_ROTARY: dict[str, tuple[dict[str, Any], str]] = {
    "range": ({"r1": torch.full((1, 5, 1, 8), 1.5).half()}, r"within \[-1, 1\], not 1.5"),
    "mode": ({"rotary_mode": "quarter"}, "unknown rotary_mode"),
    "dims": ({"input": half(5, 3, 8)}, "input of 3 dimensions"),
    "dtype": ({"r1": torch.zeros(1, 5, 1, 8)}, "r1 of torch.float32"),
    "shape": ({"input": half(1, 6, 3, 8)}, r"r1 \(1, 5, 1, 8\) for input"),
    "odd": ({"input": half(1, 5, 3, 7), "r1": half(1, 5, 1, 7), "r2": half(1, 5, 1, 7)}, "head dim 7"),
    "heads": ({"input": torch.zeros(1, 5, 1000, 8).half()}, "for input"),
    "unlike": ({"r2": torch.zeros(1, 1, 5, 8).half()}, "r1 unlike r2"),
    "rotate": ({"rotate": torch.zeros(8, 8)}, "rotate is documented"),
    "slices": ({"input": half(1, 5, 3, 16)[..., :8]}, "input is not contiguous"),
}


@pytest.mark.parametrize("name", BAD_ROTARY)
def test_what_rotary_mul_refuses(name: str) -> None:
    changes, rule = BAD_ROTARY[name]
    zeros = torch.zeros(1, 5, 1, 8).half()
    with pytest.raises(RuntimeError, match=rule):
        torch.ops.npu.npu_rotary_mul(**({"input": half(1, 5, 3, 8), "r1": zeros, "r2": zeros} | changes))


def test_swiglu() -> None:
    x = half(3, 16)
    made = torch.ops.npu.npu_swiglu(x, -1)
    gate, up = x.double().chunk(2, -1)
    assert close(made, gate / (1 + (-gate).exp()) * up)
    with pytest.raises(RuntimeError, match="an even number"):
        torch.ops.npu.npu_swiglu(half(3, 7))


# -- the emulation itself ----------------------------------------------------------------------------------------------


def test_calls_fail_when_they_are_told_to() -> None:
    x = half(3, 16)
    with operators.emulated(fail_after=1, failure="NPU error, error code is 507035"):
        torch.ops.npu.npu_swiglu(x)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="NPU error, error code is 507035"):
                torch.ops.npu.npu_swiglu(x)
    torch.ops.npu.npu_swiglu(x)


def test_it_imports_nothing_of_what_it_tests() -> None:
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.startswith("pagedkv")], path
