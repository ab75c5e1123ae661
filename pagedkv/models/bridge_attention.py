"""How the attention calls of a foreign model become ours: recorded once into layer specs, then passed to `attend`.

Nothing here knows the library that the model comes from; `bridge.py` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from pagedkv.api import LayerSpec
from pagedkv.api.errors import InternalError, ModelError
from pagedkv.models.decoder import Attend

MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""rule(batch, head, query index, key index) -> visible, on index tensors that broadcast against each other."""

HARMLESS = frozenset(
    {
        "cache_position",
        "head_mask",
        "is_causal",
        "labels",
        "layer_idx",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "sliding_window",
        "use_cache",
    }
)
"""What a model may pass along with a call and we may leave aside: the window is read from the mask, which decides."""

FARTHEST = 1 << 17
"""Positions up to which a mask is examined."""


class Marker(Tensor):
    """Stands where a model expects its mask: one element that broadcasts, and the rule the model asked for.

    `window` is what the rule was found to be, once it was examined: layers mostly share one mask.
    """

    rule: MaskRule
    window: int | None

    @staticmethod
    def of(rule: MaskRule, device: Any) -> Marker:
        marker = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device).as_subclass(Marker)
        marker.rule = rule
        return marker


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One attention call as a model makes it, and the sinks [Hq] it brings."""

    scale: float
    softcap: float | None
    sinks: Tensor | None


class Port:
    """Where the attention modules of one model deliver their queries, keys and values; owned by one decoder.

    A layer is a call: the n-th of a forward is layer n, so `begin` comes first and `end` checks that all came.
    """

    def __init__(self) -> None:
        self.specs: tuple[LayerSpec, ...] = ()
        self.sinks: dict[int, Tensor] = {}
        self._recorded: list[LayerSpec] | None = None
        self._attend: Attend | None = None
        self._at = 0

    # -- recording -----------------------------------------------------------------------------------------------------

    def record(self, forward: Callable[[], Any], max_position: int) -> Any:
        """Run `forward` with attention that returns anything, keep its calls as `specs`, and return its result."""
        self._recorded, self._max_position = [], max_position
        try:
            result = forward()
            self.specs = tuple(self._recorded)
        finally:
            self._recorded = None
        return result

    def _note(self, recorded: list[LayerSpec], q: Tensor, k: Tensor, v: Tensor, mask: Any, call: Call) -> None:
        at = len(recorded)
        recorded.append(
            LayerSpec(
                index=at,
                q_heads=q.shape[1],
                kv_heads=k.shape[1],
                k_dim=k.shape[3],
                v_dim=v.shape[3],
                scale=call.scale,
                window=window_of(mask, self._max_position, at),
                softcap=call.softcap,
                sinks=call.sinks is not None,
                kv_heads_total=k.shape[1],
            )
        )

    # -- running -------------------------------------------------------------------------------------------------------

    def run(self, attend: Attend, forward: Callable[[], Any]) -> Any:
        """Run `forward` with its attention done by `attend`."""
        self._attend, self._at = attend, 0
        try:
            result = forward()
        finally:
            self._attend = None
        if self._at != len(self.specs):
            raise InternalError(f"the model made {self._at} attention calls, {len(self.specs)} were expected")
        return result

    def __call__(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, named: Mapping[str, Any]) -> Tensor:
        """Attention of q [1, Hq, T, Dk] over k, v [1, Hkv, T, D] and what is cached: [1, T, Hq, Dv]."""
        call = read_call(module, q, named)
        out = q.new_empty(q.shape[2], q.shape[1], v.shape[3])
        if self._recorded is not None:
            self._note(self._recorded, q, k, v, mask, call)
            return out.unsqueeze(0)
        if self._attend is None:
            raise InternalError("the model was run outside its decoder")
        spec = self.specs[self._at]
        if (call.scale, call.softcap, q.shape[1], k.shape[1]) != (
            spec.scale,
            spec.softcap,
            spec.q_heads,
            spec.kv_heads,
        ):
            raise InternalError(f"attention call {self._at} of the model changed: {call} is not {spec}")
        if call.sinks is not None and self._at not in self.sinks and not call.sinks.is_meta:
            self.sinks[self._at] = call.sinks.detach().float().cpu()
        self._attend(self._at, _rows(q), _rows(k), _rows(v), out)
        self._at += 1
        return out.unsqueeze(0)


def _rows(heads: Tensor) -> Tensor:
    """[1, H, T, D] seen as [T, H, D]; copied where a token's heads do not lie together, which a backend may rely on."""
    rows = heads[0].transpose(0, 1)
    together = rows.stride(2) == 1 and rows.stride(1) == rows.shape[2]
    return rows if together else rows.contiguous()


def read_call(module: Any, q: Tensor, named: Mapping[str, Any]) -> Call:
    """What a call asks for besides its tensors. Raises `ModelError` for anything that is not known to be harmless."""
    where = type(module).__name__
    causal = named.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ModelError(f"{where} attends to tokens that come later, so it writes no text from left to right")
    if q.shape[0] != 1:
        raise ModelError(f"{where} changes the batch before attention; only one packed row is possible here")
    if named.get("dropout"):
        raise ModelError(f"{where} applies dropout of {named['dropout']} outside training")
    given = {name for name, value in named.items() if value is not None}
    if unknown := given - HARMLESS - {"scaling", "softcap", "s_aux", "dropout"}:
        raise ModelError(
            f"{where} passes {', '.join(sorted(unknown))} to attention, which the paged attention here does not have"
        )
    scaling, softcap = named.get("scaling"), named.get("softcap")
    return Call(
        scale=q.shape[3] ** -0.5 if scaling is None else float(scaling),
        softcap=None if softcap is None else float(softcap),
        sinks=named.get("s_aux"),
    )


# -- masks -------------------------------------------------------------------------------------------------------------


def window_of(mask: Any, max_position: int, layer: int) -> int | None:
    """The sliding window of the mask that a layer got, None where every earlier key is visible.

    Examined up to `max_position`, or `FARTHEST` where that is less. Raises `ModelError` for a mask that is not the
    registry's own, or neither causal nor a causal sliding window.
    """
    if not is_marker(mask):
        what = "no mask" if mask is None else "a mask of its own making"
        raise ModelError(
            f"attention layer {layer} uses {what} instead of the one asked for by name, so it may see other tokens "
            "than a paged cache would show it"
        )
    if not hasattr(mask, "window"):
        try:
            mask.window = _examine(mask.rule, min(max_position, FARTHEST) - 1)
        except ModelError as error:
            raise ModelError(f"the mask of attention layer {layer} {error}") from error
    return mask.window


def _examine(rule: MaskRule, end: int) -> int | None:
    """The window of a rule over positions 0 .. end."""
    try:
        keys = _visible(rule, end, end).nonzero().flatten()
        first = int(keys[0]) if len(keys) else end
        window = end - first + 1 if first else None
        known = all(torch.equal(_visible(rule, q, end), _expected(q, end, window)) for q in _samples(end, window))
    except (RuntimeError, IndexError, NotImplementedError) as error:
        raise ModelError(f"depends on more than positions: {error}") from error
    if not known:
        raise ModelError("is neither causal nor a sliding window (chunked, maybe)")
    return window


def is_marker(mask: Any) -> TypeGuard[Marker]:
    """Whether it is the very mask that was handed out: what is computed from one has no rule."""
    return isinstance(mask, Marker) and hasattr(mask, "rule")


def _samples(end: int, window: int | None) -> list[int]:
    near = {0, 1, 2, 3, end // 3, end // 2, end - 1, end}
    edges = set() if window is None else {window - 2, window - 1, window, window + 1, 2 * window, 2 * window + 1}
    return sorted(q for q in near | edges if 0 <= q <= end)


def _visible(rule: MaskRule, query: int, end: int) -> Tensor:
    """Which of the keys 0 .. end a query sees, by the rule."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    keys = torch.arange(end + 1).view(1, 1, 1, -1)
    seen = rule(zero, zero, torch.full_like(zero, query), keys)
    return torch.broadcast_to(seen, (1, 1, 1, end + 1)).flatten().to(torch.bool)


def _expected(query: int, end: int, window: int | None) -> Tensor:
    keys = torch.arange(end + 1)
    return (keys <= query) & (keys > query - (end + 1 if window is None else window))
