"""What the launchers of attention take besides q and out: the layer, its cache and the batch, as tensors and numbers.

    keys of one layer     [num_blocks, kv_heads, block_size, k_dim]     any block stride and head stride
    one head of a block   [block_size, k_dim]                           entries adjacent, tokens one row apart

With the head before the token, what one program reads of a block is one stretch of memory, and one descriptor load.
Where several layers share a block's bytes, the block stride is the bytes of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cache:
    """Keys and values of one layer.

    keys [num_blocks, kv_heads, block_size, k_dim], values the same with v_dim, both of one dtype: q's, or a 16-bit one
    under float32 queries, or int8, float8_e4m3fn, float8_e5m2. A quantized cache has `k_scale` and `v_scale`, float32
    of [num_blocks, kv_heads, block_size] (one per token and head: written by `append`), of [kv_heads] or of []
    (given beforehand): what is stored times its scale is the value.
    """

    keys: torch.Tensor
    values: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """What the mathematics of one layer needs to know, named as in the contract's `LayerSpec`.

    `sinks` and `alibi` are float32 [q_heads] on the device, or None where the layer has none.
    """

    q_heads: int
    kv_heads: int
    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    alibi: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The batch on the device, and the bounds that the host needs to size a launch.

    cu_q [S + 1], ctx_len [S], block_table [R, W] (any row stride) and rows [S] are int32 on the device, S >= num_seqs;
    they may change in place between launches as long as the numbers below stay upper bounds: `num_seqs` rows,
    `num_tokens` query tokens, `max_ctx` tokens of context. The first `num_decode` rows have at most `decode_q` query
    tokens each; exactly these rows go to the kernel for few queries.
    """

    cu_q: torch.Tensor
    ctx_len: torch.Tensor
    block_table: torch.Tensor
    rows: torch.Tensor
    num_seqs: int
    num_tokens: int
    max_ctx: int
    num_decode: int = 0
    decode_q: int = 1
