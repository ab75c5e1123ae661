"""The comparison after loading finds what a bridged model could do wrong, and its own attention is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagedkv.api import LayerSpec
from pagedkv.errors import InternalError, ModelError
from pagedkv.models.bridge import BridgedCheckpoint, BridgedDecoder
from pagedkv.models.bridge_attention import Marker, Port, window_of
from pagedkv.models.bridge_check import check, plain_attention
from tests.helpers.plain import OpsOnlyBackend
from tests.helpers.tiny_bridged import bridged_model

Forward = Callable[..., Tensor]


def spec(**names: Any) -> LayerSpec:
    return LayerSpec(**{"index": 0, "q_heads": 4, "kv_heads": 2, "k_dim": 8, "v_dim": 6, "scale": 0.3, **names})


# -- plain attention ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 3, 50])
def test_plain_attention_is_torchs(window: int | None) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 6)
    at, key = torch.arange(5, 9)[:, None], torch.arange(9)[None]
    seen = (key <= at) & (key > at - (window or 99))
    expected = scaled_dot_product_attention(
        *(x.transpose(0, 1)[None].double() for x in (q, k, v)), attn_mask=seen, scale=0.3, enable_gqa=True
    )
    got = plain_attention(spec(window=window), q, k, v)
    torch.testing.assert_close(got, expected[0].transpose(0, 1).float())


def test_plain_attention_caps_and_sinks() -> None:
    q, k, v = torch.full((1, 1, 1), 2.0), torch.tensor([[[1.0]], [[3.0]]]), torch.tensor([[[5.0]], [[7.0]]])
    one = {"q_heads": 1, "kv_heads": 1, "k_dim": 1, "v_dim": 1, "scale": 1.0}
    scores = 4 * torch.tanh(torch.tensor([2.0, 6.0]) / 4)
    weights = scores.exp() / (scores.exp().sum() + torch.tensor(1.5).exp())
    got = plain_attention(spec(**one, softcap=4.0, sinks=True), q, k, v, torch.tensor([1.5]))
    torch.testing.assert_close(got.flatten(), (weights * torch.tensor([5.0, 7.0])).sum()[None])


# -- what the comparison finds -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> BridgedDecoder:
    checkpoint = BridgedCheckpoint(bridged_model(tmp_path_factory.mktemp("check"), "olmo2"))
    return BridgedDecoder.load(checkpoint, OpsOnlyBackend(), "fp32")


def compare(decoder: BridgedDecoder, forward: Forward, **changes: Any) -> None:
    config = decoder.config
    named: dict[str, Any] = {"specs": config.layers, "sinks": {}, "vocab_size": config.vocab_size, **changes}
    check(forward, decoder._alone, **named, dtype=torch.float32, device="cpu")


def test_a_model_that_is_right_passes(decoder: BridgedDecoder) -> None:
    compare(decoder, decoder.forward)


def test_positions_taken_from_the_batch_are_found(decoder: BridgedDecoder) -> None:
    def forward(ids: Tensor, positions: Tensor, attend: Any, rows: Any) -> Tensor:
        return decoder.forward(ids, torch.arange(len(ids)), attend, rows)

    with pytest.raises(ModelError, match="takes positions from the batch"):
        compare(decoder, forward)


def test_a_state_beside_the_cache_is_found(decoder: BridgedDecoder) -> None:
    def forward(ids: Tensor, positions: Tensor, attend: Any, rows: Any) -> Tensor:
        logits = decoder.forward(ids, positions, attend, rows)
        return logits + 0.1 * torch.cat([torch.zeros_like(logits[:1]), logits[:-1]])  # as a convolution over tokens

    with pytest.raises(ModelError, match="keeps a state outside attention"):
        compare(decoder, forward)


@pytest.mark.parametrize("wrong", [{"scale": 0.4}, {"window": 2}, {"softcap": 1.0}])
def test_a_layer_that_was_misread_is_found(decoder: BridgedDecoder, wrong: dict[str, Any]) -> None:
    specs = tuple(dataclasses.replace(layer, **wrong) for layer in decoder.config.layers)
    with pytest.raises(ModelError, match="gives other logits with a paged cache than alone"):
        compare(decoder, decoder.forward, specs=specs)


def test_logits_that_are_no_numbers_are_named(decoder: BridgedDecoder) -> None:
    with pytest.raises(ModelError, match="not numbers"):
        compare(decoder, lambda *args: decoder.forward(*args) * float("nan"))


def test_rows_choose_the_logits(decoder: BridgedDecoder) -> None:
    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        out.copy_(q)

    ids = torch.tensor([5, 6, 7, 8, 9])
    everything = decoder.forward(ids, ids, attend)
    assert everything.shape == (5, decoder.config.vocab_size)
    torch.testing.assert_close(decoder.forward(ids, ids, attend, torch.tensor([3, 0])), everything[[3, 0]])


def test_an_attention_call_of_another_kind_is_not_served(decoder: BridgedDecoder) -> None:
    model = decoder._model
    module = model.model.layers[1].self_attn
    module.scaling *= 2
    try:
        with pytest.raises(InternalError, match="attention call 1 of the model changed"):
            decoder.forward(torch.tensor([1]), torch.tensor([0]), lambda *_: None)
    finally:
        module.scaling /= 2
    with pytest.raises(InternalError, match="outside its decoder"):
        model(input_ids=torch.tensor([[1]]), use_cache=False)


# -- masks -------------------------------------------------------------------------------------------------------------


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k <= q


@pytest.mark.parametrize("window", [1, 2, 7, 63, 64])
def test_windows_are_read_from_masks(window: int) -> None:
    marker = Marker.of(lambda b, h, q, k: (k <= q) & (k > q - window), "cpu")
    assert window_of(marker, 64, 0) == (window if window < 64 else None)
    assert window_of(Marker.of(causal, "cpu"), 64, 0) is None


@pytest.mark.parametrize(
    "rule",
    [
        lambda b, h, q, k: k >= 0,
        lambda b, h, q, k: (k <= q) & (k // 8 == q // 8),
        lambda b, h, q, k: (k <= q) | (k < 4),
        lambda b, h, q, k: (k <= q) & ((k > q - 5) | (k == 0)),
        lambda b, h, q, k: k < q,
    ],
    ids=["both ways", "chunked", "prefix", "window with a sink token", "not itself"],
)
def test_other_masks_are_refused(rule: Any) -> None:
    with pytest.raises(ModelError, match="mask of attention layer 3 is neither causal nor a sliding window"):
        window_of(Marker.of(rule, "cpu"), 64, 3)


def test_a_mask_that_was_changed_is_not_trusted() -> None:
    with pytest.raises(ModelError, match="a mask of its own making"):
        window_of(Marker.of(causal, "cpu")[:, :, :, :1], 64, 0)
    with pytest.raises(ModelError, match="uses no mask"):
        window_of(None, 64, 0)


class Module(torch.nn.Module):
    """An attention module as the registry sees it."""


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"position_bias": torch.zeros(1)}, "passes position_bias to attention"),
        ({"indices": torch.zeros(1), "alibi": 3}, "passes alibi, indices"),
        ({"is_causal": False}, "attends to tokens that come later"),
        ({"dropout": 0.1}, "dropout of 0.1 outside training"),
    ],
)
def test_what_paged_attention_lacks_is_refused_by_name(named: dict[str, Any], words: str) -> None:
    port, q = Port(), torch.zeros(1, 4, 3, 8)
    with pytest.raises(ModelError, match=f"Module (applies )?{words}"):
        port.record(lambda: port(Module(), q, q, q, Marker.of(causal, "cpu"), named), 8)
    assert port.specs == ()
