"""U115: a device without bf16: auto converts with a line, bf16 by name is refused, a module left in it is found."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedkv import LLM, SamplingParams
from pagedkv.api.errors import ModelError, UnsupportedError
from pagedkv.models import bridge
from tests.helpers.cpu_plugins import cpu_plugin
from tests.helpers.tiny_bridged import bridged_model
from tests.helpers.tiny_models import hf_greedy, tiny_model

HALF = ("fp16", "fp32")
SETTINGS: dict[str, Any] = {"backend": "half", "backend_options": {"threads": 1}, "num_blocks": 16}
PROMPT = [256, 10, 20, 30]


@pytest.fixture(autouse=True)
def half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend with fp16 and fp32."""
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)
    site = cpu_plugin(tmp_path / "site", "half", dtypes=HALF, native_dtypes=HALF, kv_dtypes=HALF)
    monkeypatch.syspath_prepend(str(site))


def test_u115_auto_converts_with_a_line_and_computes_in_what_it_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pagedkv")
    model = tiny_model(tmp_path, dtype="bfloat16")
    with LLM(str(model), skip_tokenizer_init=True, **SETTINGS) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    assert output.outputs[0].token_ids == hf_greedy(model, PROMPT, 5, dtype="float16", ignore_eos=True)
    said = "dtype fp16: the checkpoint's bf16 is not available on half, so the preferred one of half"
    assert said in [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("setting", ["dtype", "kv_cache_dtype"])
def test_u115_bf16_by_name_is_refused_before_a_file_is_opened(setting: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        LLM("nowhere", skip_tokenizer_init=True, **{setting: "bfloat16"}, **SETTINGS)
    name = "dtype" if setting == "dtype" else "kv_dtype"
    assert f"backend half does not support {name}='bf16'; accepted: fp16, fp32" in str(raised.value)


class Converting(torch.nn.Module):
    """A module that computes in bf16, whatever it is given: nothing fails on a device that has it."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x.to(torch.bfloat16)).to(x.dtype)
        return found


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("converts", [False, True])
def test_u115_a_module_left_in_bf16_is_found_after_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, converts: bool
) -> None:
    build = bridge.BridgedCheckpoint.build

    def mixed(self: bridge.BridgedCheckpoint, wanted: torch.dtype) -> Any:
        model = build(self, wanted)
        layer = model.model.layers[1]
        layer.mlp = Converting(layer.mlp) if converts else layer.mlp.to(torch.bfloat16)
        return model

    monkeypatch.setattr(bridge.BridgedCheckpoint, "build", mixed)
    with pytest.raises(ModelError) as raised:
        LLM(str(bridged_model(tmp_path, "olmo2")), dtype=dtype, skip_tokenizer_init=True, **SETTINGS)
    inner = "inner." if converts else ""
    assert str(raised.value) == (
        f"model.layers.1.mlp.{inner}gate_proj.weight is left in bfloat16 where the model runs in {dtype}; convert it, "
        "or choose dtype bfloat16"
    )
