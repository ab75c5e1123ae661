"""Ops that the backend computes itself, against the reference in float64; what it declines is not asked for.

Ids have no tolerance, edges have: an id is right if the reference draws it for a number, or a share, `EDGE` beside.
"""

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

NUMBERS = {50: (0.0, 0.45, 1 - 2**-24), 5003: (0.31,)}
"""Vocabulary -> the random numbers that `sample` gets: both ends and the middle; few where rows are long."""
EDGE = 1e-6
"""How near to a token's edge float32 sums may take its neighbour, as a share of the whole."""

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
@pytest.mark.parametrize("name", [*ASKS, "greedy", "sample"])
def test_unknown_attribute(kit: Kit, name: str) -> None:
    ask = ASKS[name][0] if name in ASKS else Ask(dims={"vocab": min(NUMBERS)}, arguments=lambda draw, t: ())
    spec = OpSpec(dtype=kit.dtype, dims=ask.dims, attributes={**ask.attributes, "attribute_of_tomorrow": 1})
    assert kit.backend.op(name, spec) is None, (
        f"op({name!r}) with an attribute it cannot know gives something: it would ignore what the attribute asks for"
    )


# -- sampling ----------------------------------------------------------------------------------------------------------

INF, NAN = float("inf"), float("nan")

CUTS = ((1.0, 0, 1.0), (0.0, 3, 0.5), (0.7, 5, 1.0), (1.3, 0, 0.8), (2.0, 20, 0.6), (1.0, 1, 1.0), (1.0, 0, 0.0))
"""(temperature, top_k, top_p), one for each row in turn; top_k 0 stands for the vocabulary, which cuts nothing."""


def _unkind(logits: torch.Tensor) -> list[torch.Tensor]:
    """Rows [1, V] made of a plain one: ties, masked ids, certainty, a NaN, nothing."""
    tied, few, certain, spoiled = (logits[:1].clone() for _ in range(4))
    tied[0, [7, 3, 40]] = tied.max() + 1
    few[0, torch.arange(few.shape[1]) % 9 != 4] = -INF
    certain[0, [30, 20]] = INF
    spoiled[0, -1] = NAN
    flat = torch.zeros_like(logits[:1])
    return [tied, few, certain, spoiled, flat, torch.full_like(flat, -INF)]


def _logits(dtype: str, vocab: int, seed: int = 0) -> torch.Tensor:
    """Plain rows and unkind ones; in 16 bits most rows have ties."""
    plain = 3 * torch.randn(len(CUTS), vocab, generator=torch.Generator().manual_seed(seed))
    return torch.cat([plain, *_unkind(plain)]).to(TORCH[dtype])


def _sampling_op(kit: Kit, name: str, dtype: str, vocab: int) -> Callable[..., list[int]] | None:
    """The backend's op over host tensors, its ids checked for their form; None where it has none."""
    op = kit.backend.op(name, OpSpec(dtype=dtype, dims={"vocab": vocab}))
    if op is None:
        return None

    def asked(*arguments: torch.Tensor) -> list[int]:
        ids = op(*(tensor.to(kit.backend.torch_device, copy=True) for tensor in arguments))
        form = (tuple(ids.shape), ids.dtype)
        assert form == ((len(arguments[0]),), torch.int32), f"{name} gives {form}, must give one int32 for each row"
        event, found = kit.backend.to_host(ids)
        event.join()
        return [int(i) for i in found]

    return asked


@pytest.mark.law("ops: greedy gives the lowest of the most probable ids, and -1 where there is none")
def test_greedy(kit: Kit) -> None:
    answered = 0
    for dtype in (d for d in kit.can.dtypes if d in TORCH):
        for vocab in NUMBERS:
            op = _sampling_op(kit, "greedy", dtype, vocab)
            if op is not None:
                answered += 1
                logits = _logits(dtype, vocab)
                _same_ids(op(logits), [{i} for i in REFERENCE["greedy"](logits).tolist()], "greedy", dtype, vocab)
    kit.report("answered", answered)


@pytest.mark.law("ops: sample cuts by top-k and top-p and draws as its reference does")
def test_sample(kit: Kit) -> None:
    answered = 0
    for dtype in (d for d in kit.can.dtypes if d in TORCH):
        for vocab in NUMBERS:
            op = _sampling_op(kit, "sample", dtype, vocab)
            if op is not None:
                answered += 1
                for number in NUMBERS[vocab]:
                    columns = _columns(_logits(dtype, vocab), number, number)
                    _same_ids(op(*columns), _allowed(columns), f"sample of number {number}", dtype, vocab)
    kit.report("answered", answered)


@pytest.mark.law("ops: a sampled id depends on its own row alone")
def test_sample_alone_and_in_company(kit: Kit) -> None:
    op = _sampling_op(kit, "sample", kit.dtype, max(NUMBERS))
    if op is None:
        return
    columns = _columns(_logits(kit.dtype, max(NUMBERS), seed=1), 0.05, 0.95)
    together = op(*columns)
    order = torch.randperm(len(together), generator=torch.Generator().manual_seed(0))
    assert op(*(c[order] for c in columns)) == [together[i] for i in order.tolist()], "another order, other ids"
    for row in range(len(together)):
        assert op(*(c[row : row + 1] for c in columns)) == together[row : row + 1], f"row {row} alone has another id"


def _columns(logits: torch.Tensor, first: float, last: float) -> tuple[torch.Tensor, ...]:
    """logits, numbers from `first` to `last`, temperature, top_k, top_p: each row has one of `CUTS`."""
    count, vocab = logits.shape
    rows = [CUTS[i % len(CUTS)] for i in range(count)]
    heat, top_k, top_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    top_k = torch.where(top_k == 0, vocab, top_k).to(torch.int32)
    return logits, torch.linspace(first, last, count), heat, top_k, top_p


def _allowed(columns: tuple[torch.Tensor, ...]) -> list[set[int]]:
    """The ids that the reference draws for a number and a share of at most `EDGE` beside what each row has."""
    logits, numbers, heat, top_k, top_p = columns
    found: list[set[int]] = [set() for _ in range(len(logits))]
    for aside in (-EDGE, 0.0, EDGE):
        for cut in (-EDGE, 0.0, EDGE):
            near = (numbers.double() + aside).clamp(0, 1 - 2**-53)
            share = torch.where((top_p > 0) & (top_p < 1), top_p.double() + cut, top_p.double())
            for ids, i in zip(found, REFERENCE["sample"](logits, near, heat, top_k, share).tolist(), strict=True):
                ids.add(i)
    return found


def _same_ids(got: list[int], allowed: list[set[int]], what: str, dtype: str, vocab: int) -> None:
    for row, (mine, theirs) in enumerate(zip(got, allowed, strict=True)):
        assert mine in theirs, f"{what}, {dtype}, vocabulary of {vocab}: row {row} gives {mine}, expected {theirs}"


# -- comparing ---------------------------------------------------------------------------------------------------------


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
