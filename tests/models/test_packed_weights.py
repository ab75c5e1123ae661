"""Weights that stay in the blocks of their file: the same logits as dequantized ones, each read once, nothing twice."""

from __future__ import annotations

import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.api import OpSpec
from pagedkv.api.errors import ModelError
from pagedkv.models.checkpoint import GgufCheckpoint
from pagedkv.models.native import NativeDecoder
from pagedkv.models.packing import SideBySide
from pagedkv.ops import FormatLinear, PackedLinear
from tests.helpers.formats import Formats
from tests.helpers.gguf_files import quantized_file
from tests.helpers.plain import DenseAttention, OpsOnlyBackend

ALL = ("Q4_0", "Q4_1", "Q8_0", "Q5_0")


def packed(checkpoint: GgufCheckpoint, backend: Formats, dtype: str = "fp32") -> NativeDecoder:
    return NativeDecoder.load(checkpoint, backend, dtype, plan=checkpoint.plan(backend, dtype, None))


def logits(model: NativeDecoder) -> torch.Tensor:
    ids = torch.randint(0, 320, (12,), generator=torch.Generator().manual_seed(5))
    return model.forward(ids, torch.arange(12), DenseAttention(model.config.layer_specs()))


def dense(checkpoint: GgufCheckpoint, dtype: str = "fp32") -> torch.Tensor:
    return logits(NativeDecoder.load(checkpoint, OpsOnlyBackend(), dtype))


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(("architecture", "tied"), [("llama", True), ("llama", False), ("qwen2", True)])
def test_the_logits_are_those_of_dequantized_weights(tmp_path: Path, kind: str, architecture: str, tied: bool) -> None:
    """Llama's q and k rows are put in order, qwen2 has biases; q, k, v and gate, up are one product each."""
    checkpoint = GgufCheckpoint(quantized_file(tmp_path / "a.gguf", {"": kind}, architecture=architecture, tied=tied))
    backend = Formats(ALL)
    assert torch.equal(logits(packed(checkpoint, backend)), dense(checkpoint))
    asked = {(name, *spec.dims.values()) for name, spec in backend.asked if "format" in spec.attributes}
    assert {("linear", 128, 64), ("linear", 192, 64), ("embedding", 320, 64), ("linear", 320, 64)} <= asked


@pytest.mark.parametrize(
    "kinds",
    [
        {"": "Q4_0", "attn_v": "Q8_0", "ffn_up": "Q4_1"},
        {"": "Q4_0", "attn_k": "Q8_0"},
        {"": "Q4_1", "attn_v": "Q5_1", "token_embd": "F16"},
        {"": "Q8_0", "attn_q": "BF16", "ffn_gate": "Q5_1", "ffn_down": "F32", "token_embd": "Q5_1"},
    ],
    ids=["two formats", "in the middle", "one unknown", "mostly plain"],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_mixed_formats_are_products_side_by_side(tmp_path: Path, kinds: dict[str, str], architecture: str) -> None:
    checkpoint = GgufCheckpoint(quantized_file(tmp_path / "a.gguf", kinds, architecture=architecture))
    model = packed(checkpoint, Formats(ALL))
    qkv = model._layers[0].qkv
    assert isinstance(qkv, SideBySide)
    assert len(qkv.parts) == (3 if "attn_k" in kinds else 2)
    torch.testing.assert_close(logits(model), dense(checkpoint), atol=1e-5, rtol=1e-5)


def test_experts_stay_packed_and_the_router_does_not(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(quantized_file(tmp_path / "a.gguf", {"": "Q4_0", "down": "Q8_0"}, experts=4))
    backend = Formats(ALL)
    plan = checkpoint.plan(backend, "fp32", None)
    assert plan.packed["model.layers.1.mlp.experts.3.down_proj.weight"] == "Q8_0"
    assert "model.layers.0.mlp.gate.weight" not in plan.packed
    assert torch.equal(logits(packed(checkpoint, backend)), dense(checkpoint))


def test_an_op_for_the_dtype_is_needed(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(quantized_file(tmp_path / "a.gguf", {"": "Q8_0"}))
    plan = checkpoint.plan(Formats(ALL, dtype="fp32"), "bf16", None)
    assert not plan.packed
    assert "the backend has no product for it in bf16" in {tally.against for tally in plan.tallies}
    half = Formats(ALL, dtype="bf16")
    assert torch.equal(logits(packed(checkpoint, half, "bf16")), dense(checkpoint, "bf16"))


def test_each_tensor_is_read_once_and_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = GgufCheckpoint(
        quantized_file(tmp_path / "a.gguf", {"": "Q4_0", "attn_v": "F16"}, architecture="qwen2")
    )
    read: Counter[str] = Counter()
    for method in ("blocks", "tensor"):
        plain: Any = getattr(checkpoint, method)

        def counting(name: str, *more: Any, plain: Any = plain) -> Any:
            read[name] += 1
            return plain(name, *more)

        monkeypatch.setattr(checkpoint, method, counting)
    backend, steps = Formats(ALL), []
    plan = checkpoint.plan(backend, "fp32", None)
    assert not read, "nothing is read to plan"
    NativeDecoder.load(checkpoint, backend, "fp32", plan=plan, progress=lambda done, total: steps.append((done, total)))
    assert read == Counter(checkpoint.names())
    assert steps == [(i + 1, len(read)) for i in range(len(read))]


@pytest.mark.parametrize("names", [("linear", "embedding"), ("linear",)])
def test_a_tied_head_shares_the_table_or_is_said_to_be_held_twice(tmp_path: Path, names: tuple[str, ...]) -> None:
    checkpoint = GgufCheckpoint(quantized_file(tmp_path / "a.gguf", {"": "Q8_0"}))
    plan = checkpoint.plan(Formats(ALL, names), "fp32", None)
    model = packed(checkpoint, Formats(ALL, names))
    shared = len(names) == 2
    assert (model._head.packed is model._embedding.packed) is shared
    assert bool(plan.twice) is not shared
    assert plan.twice in (0, int(320 * 2 * 34 * 1.125))
    assert torch.equal(logits(model), dense(checkpoint))
    reasons = {tally.against for tally in plan.tallies if tally.format == "Q8_0"}
    assert reasons == ({None} if shared else {None, "the backend has no look-up for it in fp32"})


def test_only_a_look_up_keeps_only_an_untied_table(tmp_path: Path) -> None:
    for tied in (True, False):
        checkpoint = GgufCheckpoint(quantized_file(tmp_path / f"{tied}.gguf", {"": "Q4_1"}, tied=tied))
        backend = Formats(ALL, ("embedding",))
        assert list(checkpoint.plan(backend, "fp32", None).packed) == ([] if tied else ["model.embed_tokens.weight"])
        assert torch.equal(logits(packed(checkpoint, backend)), dense(checkpoint))


class _Copying(FormatLinear):
    """Keeps a copy of the blocks, destroys what it was given, and watches how much of that is alive."""

    given: list[weakref.ref[torch.Tensor]]
    alive: list[int]

    def pack(self, blocks: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        self.alive.append(sum(ref() is not None for ref in self.given))
        self.given.append(weakref.ref(blocks))
        kept = PackedLinear(weight=blocks.clone(), bias=bias)
        blocks.fill_(255)
        return kept

    def __call__(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        return super().__call__(x, super().pack(packed.weight, packed.bias))


def test_blocks_are_let_go_before_the_next_are_read_and_may_be_destroyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = GgufCheckpoint(quantized_file(tmp_path / "a.gguf", {"": "Q4_0"}, tied=False))
    monkeypatch.setattr(_Copying, "given", [], raising=False)
    monkeypatch.setattr(_Copying, "alive", [], raising=False)

    class Backend(Formats):
        def op(self, name: str, spec: OpSpec) -> Any:
            found = super().op(name, spec)
            return _Copying(spec) if isinstance(found, FormatLinear) else found

    backend = Backend(("Q4_0",))
    plan = checkpoint.plan(backend, "fp32", None)
    model = NativeDecoder.load(checkpoint, backend, "fp32", plan=plan)
    assert len(_Copying.alive) == 2 * 4 + 1, "qkv, o, gate and up, down of two layers, and the head"
    assert max(_Copying.alive) == 0, "an earlier product's blocks are still there"
    assert torch.equal(logits(model), dense(checkpoint)), "what pack destroys is not the file's"


@pytest.mark.parametrize("kinds", [{"": "Q4_0"}, {"": "Q8_0", "token_embd": "Q5_0"}, {"": "Q4_1", "ffn": "F16"}])
@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_covers_what_is_held(tmp_path: Path, kinds: dict[str, str], tied: bool) -> None:
    checkpoint = GgufCheckpoint(quantized_file(tmp_path / "a.gguf", kinds, tied=tied))

    class Backend(Formats):
        """Packs blocks as they are."""

        def op(self, name: str, spec: OpSpec) -> Any:
            found: Any = super().op(name, spec)
            if found is not None:
                found.pack = lambda blocks, bias=None: PackedLinear(weight=blocks, bias=bias)
            return found

    backend = Backend(("Q4_0", "Q4_1", "Q8_0"))
    plan = checkpoint.plan(backend, "fp32", None)
    held = NativeDecoder.load(checkpoint, backend, "fp32", plan=plan).nbytes
    assert held <= plan.nbytes <= 1.125 * held
    assert sum(tally.nbytes for tally in plan.tallies) == checkpoint.weight_bytes
    assert sum(tally.tensors for tally in plan.tallies) == len(checkpoint.names())


def test_blocks_are_the_files_in_the_order_of_rows_here(tmp_path: Path) -> None:
    path = quantized_file(tmp_path / "a.gguf", {"": "Q8_0"}, architecture="llama")
    checkpoint = GgufCheckpoint(path)
    name = "model.layers.1.self_attn.k_proj.weight"
    blocks = checkpoint.blocks(name)
    assert blocks.shape == (32, 2 * 34)
    scales = np.ascontiguousarray(blocks.reshape(32, 2, 34)[:, :, :2]).view("<f2").astype(np.float32)
    values = blocks.reshape(32, 2, 34)[:, :, 2:].view(np.int8) * scales
    np.testing.assert_array_equal(values.reshape(32, 64), checkpoint.tensor(name, torch.float32).numpy())
    with pytest.raises(ModelError, match="has no tensor 'x'"):
        checkpoint.blocks("x")
