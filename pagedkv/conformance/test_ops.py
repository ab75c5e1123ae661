"""Ops that the backend computes itself, against the reference in float64; what it declines is not asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.api import AttentionBackend, OpSpec
from pagedkv.conformance.kit import Kit
from pagedkv.conformance.rig import TORCH
from pagedkv.ops import REFERENCE

pytestmark = pytest.mark.level("core")

TOLERANCE = {"fp32": 2e-5, "fp16": 4e-3, "bf16": 4e-2}
"""Largest error relative to the largest value of the result: several roundings, in the order each backend likes."""

TOKENS = (1, 5, 33)

Draw = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One question to a backend: dims and attributes of the spec, and the arguments for T tokens.

    `arguments(draw, tokens)`: `draw(*shape)` gives normal numbers of the op's dtype; float32 and int64 tensors are
    made as the reference asks. `weights` are packed first. `results`: which arguments the op changes in place.
    """

    dims: Mapping[str, int]
    arguments: Callable[[Draw, int], tuple[Any, ...]]
    weights: Callable[[Draw], tuple[torch.Tensor, ...]] | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict)
    results: tuple[int, ...] = ()


def _linear(n: int, k: int, bias: bool) -> Ask:
    return Ask(
        dims={"n": n, "k": k},
        arguments=lambda draw, t: (draw(t, k),),
        weights=lambda draw: (draw(n, k) / k**0.5, *((draw(n),) if bias else ())),
    )


def _norm(dim: int, wide: bool) -> Ask:
    return Ask(
        dims={"dim": dim},
        attributes={"wide": True} if wide else {},
        arguments=lambda draw, t: (draw(t, dim), _weight(draw, dim, wide), 1e-6),
    )


def _add_norm(dim: int, wide: bool) -> Ask:
    return Ask(
        dims={"dim": dim},
        attributes={"wide": True} if wide else {},
        arguments=lambda draw, t: (draw(t, dim), draw(t, dim), _weight(draw, dim, wide), 1e-6),
        results=(1,),
    )


def _weight(draw: Draw, dim: int, wide: bool) -> torch.Tensor:
    return draw(dim).float() if wide else draw(dim)


def _rope(q_heads: int, kv_heads: int, head_dim: int, rotary_dim: int) -> Ask:
    def arguments(draw: Draw, tokens: int) -> tuple[Any, ...]:
        both = draw(tokens, q_heads + kv_heads, head_dim)  # slices of one tensor are legal
        angle = draw(tokens, rotary_dim // 2).float()
        return both[:, :q_heads], both[:, q_heads:], angle.cos(), angle.sin()

    dims = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "rotary_dim": rotary_dim}
    return Ask(dims=dims, arguments=arguments, results=(0, 1))


def _gated(dim: int) -> Ask:
    return Ask(dims={"dim": dim}, arguments=lambda draw, t: (draw(t, 2 * dim),))


def _embedding(vocab: int, dim: int) -> Ask:
    return Ask(
        dims={"vocab": vocab, "dim": dim},
        arguments=lambda draw, t: ((torch.arange(t) * 7) % vocab, draw(vocab, dim)),
    )


ASKS: Mapping[str, tuple[Ask, ...]] = {
    "linear": (_linear(48, 32, False), _linear(7, 40, True), _linear(128, 64, True)),
    "rms_norm": (_norm(48, False), _norm(33, True)),
    "add_rms_norm": (_add_norm(48, False), _add_norm(33, True)),
    "rope": (_rope(6, 2, 16, 16), _rope(3, 3, 20, 8)),
    "silu_mul": (_gated(40), _gated(7)),
    "gelu_tanh_mul": (_gated(40), _gated(7)),
    "embedding": (_embedding(50, 24),),
}


@pytest.mark.law("ops: an op that the backend gives computes what its reference does")
@pytest.mark.parametrize("name", list(ASKS))
def test_against_the_reference(kit: Kit, name: str) -> None:
    answered = 0
    for dtype in (d for d in kit.can.dtypes if d in TORCH):
        for ask in ASKS[name]:
            op = kit.backend.op(name, OpSpec(dtype=dtype, dims=ask.dims, attributes=ask.attributes))
            if op is not None:
                answered += 1
                for tokens in TOKENS:
                    _compare(kit, name, op, ask, dtype, tokens)
    kit.report("answered", answered)


@pytest.mark.law("ops: an attribute that an op does not know is declined with None")
@pytest.mark.parametrize("name", list(ASKS))
def test_unknown_attribute(kit: Kit, name: str) -> None:
    ask = ASKS[name][0]
    spec = OpSpec(dtype=kit.dtype, dims=ask.dims, attributes={**ask.attributes, "attribute_of_tomorrow": 1})
    assert kit.backend.op(name, spec) is None, (
        f"op({name!r}) with an attribute it cannot know gives something: it would ignore what the attribute asks for"
    )


def _compare(kit: Kit, name: str, op: Any, ask: Ask, dtype: str, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(TORCH[dtype])

    weights = ask.weights(draw) if ask.weights else ()
    arguments = ask.arguments(draw, tokens)
    wanted = _reference(name, ask, weights, arguments)
    got = _asked(kit.backend, op, ask, weights, arguments)
    for mine, theirs in zip(got, wanted, strict=True):
        limit = TOLERANCE[dtype] * max(1.0, float(np.abs(theirs).max(initial=0)))
        _check(mine, theirs, limit, f"{name} {dtype} {dict(ask.dims)} {dict(ask.attributes)}, {tokens} tokens")


def _check(got: Any, wanted: Any, limit: float, what: str) -> None:
    assert got.shape == wanted.shape, f"{what}: shape {got.shape}, expected {wanted.shape}"
    error = float(np.abs(got - wanted).max(initial=0.0))
    assert error <= limit, f"{what}: worst error {error:.3g}, allowed {limit:.3g}"


def _reference(name: str, ask: Ask, weights: tuple[Any, ...], arguments: tuple[Any, ...]) -> list[Any]:
    """The reference's results in float64, from the rounded arguments."""
    wide = [a.double().clone() if torch.is_tensor(a) and a.is_floating_point() else a for a in arguments]
    reference: Any = REFERENCE[name]
    if ask.weights:
        wide.append(reference.pack(*(w.double() for w in weights)))
    result = reference(*wide)
    return [t.double().numpy() for t in _results(ask, wide, result)]


def _asked(
    backend: AttentionBackend, op: Any, ask: Ask, weights: tuple[Any, ...], arguments: tuple[Any, ...]
) -> list[Any]:
    """The backend's results."""
    device = backend.torch_device
    given: list[Any] = [a.to(device, copy=True) if torch.is_tensor(a) else a for a in arguments]
    if ask.weights:
        packed = op.pack(*(w.to(device, copy=True) for w in weights))
        assert type(packed.nbytes) is int and packed.nbytes > 0, f"pack() gives nbytes {packed.nbytes!r}"
        given.append(packed)
    made = _results(ask, given, op(*given))
    read = [backend.to_host(tensor.float()) for tensor in made]
    for event, _ in read:
        event.join()
    return [np.array(array, np.float64) for _, array in read]


def _results(ask: Ask, arguments: list[Any], result: Any) -> list[Any]:
    """What an op returned, and the arguments that it changed."""
    returned = [] if result is None else [result]
    return returned + [arguments[i] for i in ask.results]
