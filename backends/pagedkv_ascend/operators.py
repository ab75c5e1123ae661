"""torch-npu's operators that this backend calls, in the names of whichever version is installed.

    attention   npu_fused_infer_attention_score, _v2 where there is one
    append      npu_scatter_pa_kv_cache for caches in ND order, else _npu_reshape_and_cache

All are asked for by `torch.ops`: whoever registered them, torch-npu or a stand-in for tests, is none of our business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from pagedkv.api import BackendUnavailable

V1: Mapping[str, str] = MappingProxyType(
    {
        "op": "npu_fused_infer_attention_score",
        "workspace": "_npu_fused_infer_attention_score_get_max_workspace",
        "heads": "num_heads",
        "scale": "scale",
        "q_lengths": "actual_seq_lengths",
        "kv_lengths": "actual_seq_lengths_kv",
        "lse": "softmax_lse_flag",
    }
)
V2: Mapping[str, str] = MappingProxyType(
    {
        "op": "npu_fused_infer_attention_score_v2",
        "workspace": "_npu_fused_infer_attention_score_v2_get_max_workspace",
        "heads": "num_query_heads",
        "scale": "softmax_scale",
        "q_lengths": "actual_seq_qlen",
        "kv_lengths": "actual_seq_kvlen",
        "lse": "return_softmax_lse",
    }
)
NO_MASK, RIGHT_DOWN, BAND = 0, 3, 4
"""Sparse modes: no mask or the whole one, causal from the last key on, a band ending there."""
EVERY = 2147483647
"""As many tokens to either side as there are."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One call of the attention operator in layout BSND/BSH.

    query [batch, tokens, heads, dim]; key, value [blocks, block_size, kv_heads * dim] with `table` int32 [batch, W], or
    [batch, keys, kv_heads * dim] where block_size is 0. `kv_lengths`: keys of each sequence. mask int8 [batch, keys],
    1 hides, or the 2048 x 2048 one of the sparse modes.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_heads: int
    scale: float
    kv_lengths: Sequence[int]
    table: torch.Tensor | None = None
    block_size: int = 0
    mask: torch.Tensor | None = None
    sparse_mode: int = NO_MASK
    pre_tokens: int = EVERY
    next_tokens: int = EVERY
    lse: bool = False


class Operators:
    """What is installed. Raises `BackendUnavailable` where an operator is missing."""

    def __init__(self) -> None:
        npu, atb = torch.ops.npu, torch.ops.atb
        self.names = V2 if hasattr(npu, V2["op"]) else V1
        if not hasattr(npu, self.names["op"]):
            raise BackendUnavailable(
                f"the installed torch-npu has no {V1['op']}: install one that the table of docs/ascend.md lists"
            )
        self._attention: Any = getattr(npu, self.names["op"])
        self._scatter: Any = getattr(npu, "npu_scatter_pa_kv_cache", None)
        self._reshape: Any = getattr(atb, "_npu_reshape_and_cache", None)
        if self._scatter is None and self._reshape is None:
            raise BackendUnavailable(
                "the installed torch-npu has neither npu_scatter_pa_kv_cache nor _npu_reshape_and_cache: install one "
                "that the table of docs/ascend.md lists"
            )

    def append(
        self, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write key, value [N, heads, dim] to slots int32 [N] of keys, values [blocks, block_size, heads, dim]."""
        if self._scatter is not None:
            self._scatter(key, value, keys, values, slots, cache_mode="Norm")
        else:
            self._reshape(key, value, keys, values, slots)

    def attention(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """(result [batch, tokens, heads, dim], log-sum-exp float32 [batch, heads, tokens, 1] where asked for)."""
        made: tuple[torch.Tensor, torch.Tensor] = self._attention(*self._tensors(call), **self._named(call))
        return made[0].view(call.query.shape), made[1]

    def workspace(self, call: Call) -> torch.Tensor:
        """Working memory for this call and every smaller one."""
        made: torch.Tensor = getattr(torch.ops.npu, self.names["workspace"])(*self._tensors(call), **self._named(call))
        return made

    def attention_into(self, call: Call, workspace: torch.Tensor, result: torch.Tensor, lse: torch.Tensor) -> None:
        """The same in memory that stays: result as the query, flat."""
        self._attention.out(*self._tensors(call), **self._named(call), workspace=workspace, out=[result, lse])

    def _tensors(self, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return call.query.flatten(2), call.key, call.value

    def _named(self, call: Call) -> dict[str, Any]:
        batch, tokens, heads, _ = call.query.shape
        names = self.names
        return {
            names["heads"]: heads,
            "num_key_value_heads": call.kv_heads,
            names["scale"]: call.scale,
            "input_layout": "BSH",
            names["q_lengths"]: [tokens] * batch,
            names["kv_lengths"]: list(call.kv_lengths),
            "block_table": call.table,
            "block_size": call.block_size,
            "atten_mask": call.mask,
            "sparse_mode": call.sparse_mode,
            "pre_tokens": call.pre_tokens,
            "next_tokens": call.next_tokens,
            names["lse"]: call.lse,
        }
