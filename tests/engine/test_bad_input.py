"""Bad requests and bad starts: a typed error that says what to do, and everybody else goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv import LLM, SamplingParams
from pagedkv.errors import (
    BackendNotFound,
    ConfigError,
    ModelError,
    OutOfDeviceMemory,
    PagedKVError,
    RequestError,
    RequestInvalid,
    RequestTooLong,
    UnsupportedError,
)
from tests.helpers.engine_rig import SETTINGS, drained, folder, greedy, solo, some_prompts
from tests.helpers.tiny_models import VOCAB_SIZE

GOOD = [5, 6, 7]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(folder(), **SETTINGS | {"max_model_len": 64, "num_blocks": 11}) as made:
        yield made


def goes_on(llm: LLM) -> None:
    drained(llm)
    assert llm.generate(GOOD, greedy(4), use_tqdm=False)[0].outputs[0].token_ids == solo(GOOD, greedy(4))
    drained(llm)


PROMPTS: list[tuple[Any, str]] = [
    ([VOCAB_SIZE], f"token id {VOCAB_SIZE} at 0 is outside the vocabulary of {VOCAB_SIZE}"),
    ([1, -1], "token id -1 at 1 is outside"),
    ([1, 2**70], "outside the vocabulary"),
    ([True, False], "must be whole numbers, found True"),
    ([1, True], "found True at 1"),
    ([[1.0, 2.0]], "found 1.0 at 0"),
    ([1, 2.5], "found 2.5 at 1"),
    ([1, None], "found None"),
    ([1, "a"], "found 'a'"),
    (np.array([1.0, 2.0]), "found 1.0"),
    (np.array([True]), "found True"),
    (np.array(7), "prompts of type ndarray"),
    (np.array([[[1]]]), "found"),
    (b"text", "prompts of type bytes"),
    (bytearray(b"text"), "prompts of type bytearray"),
    ([b"text"], "not bytes"),
    (None, "prompts of type NoneType"),
    (7, "prompts of type int"),
    ({1, 2}, "prompts of type set"),
    (iter([1]), "prompts of type list_iterator"),
    ([None], "not NoneType"),
    ([1.5], "not float"),
    ("a lone \ud800 surrogate", "lone surrogate"),
    ({}, 'needs "prompt" or "prompt_token_ids"'),
    ({"prompt": 7}, '"prompt" must be text, not int'),
    ({"prompt": b"x"}, '"prompt" must be text'),
    ({"prompt_token_ids": "text"}, "must be a list of whole numbers, not str"),
    ({"prompt_token_ids": 7}, "not int"),
    ({"prompt": "x", "prompt_token_ids": "y"}, "not str"),
    ({"prompt": "x", "tokens": [1]}, r"unknown keys \['tokens'\]"),
    ({"prompt": "x", "cache_salt": 7}, '"cache_salt" must be text'),
]


@pytest.mark.parametrize(("prompt", "text"), PROMPTS, ids=range(len(PROMPTS)))
def test_a_prompt_that_is_none(llm: LLM, prompt: Any, text: str) -> None:
    with pytest.raises(RequestInvalid, match=text) as caught:
        llm.generate(prompt, greedy(2), use_tqdm=False)
    assert caught.value.field in ("prompt", "prompt_token_ids", "cache_salt")
    goes_on(llm)


def test_numpy_ids_of_any_width_are_ids(llm: LLM) -> None:
    for ids in (np.array(GOOD, np.uint8), np.array(GOOD, np.int64), [np.int32(i) for i in GOOD], tuple(GOOD)):
        assert llm.generate(ids, greedy(4), use_tqdm=False)[0].outputs[0].token_ids == solo(GOOD, greedy(4))
    two = llm.generate(np.array([GOOD, GOOD]), greedy(4), use_tqdm=False)
    assert [o.outputs[0].token_ids for o in two] == [solo(GOOD, greedy(4))] * 2


def test_too_long_for_the_model_and_for_the_cache(llm: LLM) -> None:
    with pytest.raises(RequestTooLong, match=r"prompt of 70 tokens .* the cache holds 41 \(10 blocks of 4\)") as caught:
        llm.generate([1] * 70, greedy(None), use_tqdm=False)
    assert (caught.value.needed, caught.value.available) == (71, 41)
    with LLM(folder(), **SETTINGS | {"max_model_len": 16}) as small:
        with pytest.raises(RequestTooLong, match=r"max_model_len is 16; .*raise max_model_len"):
            small.generate([1] * 16, greedy(1), use_tqdm=False)
        goes_on(small)
    goes_on(llm)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ([], "sampling_params"),
        ([SamplingParams()], "sampling_params"),
        ([SamplingParams()] * 3, "sampling_params"),
        ({"temperature": 0}, "sampling_params"),
        ({}, "sampling_params"),
        ("greedy", "sampling_params"),
        (0, "sampling_params"),
        ([SamplingParams(), None], "sampling_params"),
    ],
    ids=repr,
)
def test_sampling_parameters_of_a_wrong_kind_or_number(llm: LLM, params: Any, field: str) -> None:
    with pytest.raises(RequestInvalid, match=field) as caught:
        llm.generate([GOOD, GOOD], params, use_tqdm=False)
    assert caught.value.field == field
    goes_on(llm)


@pytest.mark.parametrize("priority", [[1], [1, 2, 3], "high", 1.5, None, [1, "2"], True, [0, True]], ids=repr)
def test_priorities_of_a_wrong_kind_or_number(llm: LLM, priority: Any) -> None:
    with pytest.raises(RequestInvalid, match="priority") as caught:
        llm.generate([GOOD, GOOD], greedy(2), use_tqdm=False, priority=priority)
    assert caught.value.field == "priority"
    goes_on(llm)


def test_ids_of_parameters_are_checked_against_the_vocabulary(llm: LLM) -> None:
    with pytest.raises(RequestInvalid, match=f"stop_token_ids must be ids from 0 to {VOCAB_SIZE - 1}"):
        llm.generate([GOOD, GOOD], [greedy(2), greedy(2, stop_token_ids=[VOCAB_SIZE])], use_tqdm=False)
    goes_on(llm)


@pytest.mark.parametrize("bad", [[], [VOCAB_SIZE], [1] * 100, "\ud800", {"prompt": "x", "salt": "y"}], ids=repr)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_bad_prompt_in_a_list_leaves_nothing_queued(llm: LLM, bad: Any, place: int) -> None:
    prompts: list[Any] = [GOOD, "fine"]
    prompts.insert(place, bad)
    steps = llm.engine.stats.steps
    with pytest.raises(RequestError, match=f"^prompt {place}: "):
        llm.generate(prompts, greedy(2), use_tqdm=False)
    assert llm.engine.stats.steps == steps
    goes_on(llm)


def test_a_bad_stream_leaves_nothing_either(llm: LLM) -> None:
    with pytest.raises(RequestInvalid):
        next(llm.stream([GOOD, []], greedy(2)))
    goes_on(llm)


# -- starts ------------------------------------------------------------------------------------------------------------

STARTS: list[tuple[dict[str, Any], type[PagedKVError], str]] = [
    ({"block_size": 5000}, UnsupportedError, "block_size=5000; accepted: 1 to 4096"),
    ({"kv_cache_dtype": "fp4"}, ConfigError, "kv_cache_dtype='fp4' is not one of"),
    (
        {"kv_cache_dtype": "fp8"},
        UnsupportedError,
        "backend cpu does not support kv_dtype='fp8_e4m3fn/tensor'; accepted",
    ),
    ({"dtype": "bfloat16", "batch_invariant": True}, UnsupportedError, "only fp32 is batch invariant"),
    ({"backend": "nosuch"}, BackendNotFound, "nosuch"),
    ({"device": 3}, PagedKVError, "there is no device 3"),
    ({"max_model_len": 257}, ConfigError, "max_model_len=257 is more than the model's own limit of 256"),
    ({"num_blocks": 10**12}, OutOfDeviceMemory, "the cache does not fit"),
    ({"num_blocks": None, "kv_cache_memory": "900TiB"}, OutOfDeviceMemory, "kv_cache_memory=.* does not fit"),
    ({"num_blocks": None, "kv_cache_memory": 10}, OutOfDeviceMemory, "the cache does not fit"),
    ({"max_num_seqs": 10**9, "max_num_batched_tokens": 10**9}, OutOfDeviceMemory, "the cache does not fit"),
    ({"backend_options": {"threads": "many"}}, ConfigError, "'threads' must be int, not 'many'"),
    ({"backend_options": {"thread": 1}}, ConfigError, "did you mean 'threads'"),
    ({"gpu_memory_utilisation": 0.5}, ConfigError, "did you mean gpu_memory_utilization"),
    ({"tensor_parallel_size": 2}, ConfigError, "tensor_parallel_size=2 is not built yet"),
    ({"tokenizer": "/nowhere/at/all"}, ModelError, "/nowhere/at/all"),
]


@pytest.mark.parametrize(("names", "error", "text"), STARTS, ids=lambda v: repr(v)[:40])
def test_a_start_that_cannot_be(names: dict[str, Any], error: type[PagedKVError], text: str) -> None:
    with pytest.raises(error, match=text):
        LLM(folder(), **SETTINGS | names)


@pytest.mark.parametrize("value", ["nosuch", "NOSUCH"])
def test_the_environment_names_a_backend_that_is_not_there(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("PAGEDKV_BACKEND", value)
    with pytest.raises(BackendNotFound, match="cpu"):
        LLM(folder(), **SETTINGS | {"backend": None})
    monkeypatch.setenv("PAGEDKV_BACKEND", " CPU ")
    with LLM(folder(), **SETTINGS | {"backend": None}) as llm:
        assert llm.engine.parts.backend_name == "cpu"


def _cut_weights(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def _hostile_header(model: Path) -> None:
    (model / "model.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")


def _pickle(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def _config(**changes: Any) -> Any:
    def change(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


FILES: list[tuple[Any, str]] = [
    (_cut_weights, "model.safetensors"),
    (_no_weights, r"no \*.safetensors file"),
    (_hostile_header, "model.safetensors"),
    (_pickle, "pickle"),
    (_config(model_type="mamba9", architectures=["Mamba9ForCausalLM"]), "amba9"),
    (_config(num_hidden_layers=4), "layers.3"),
    (_config(num_hidden_layers=10**9), "num_hidden_layers"),
    (_config(vocab_size=-1), "vocab_size"),
    (_config(hidden_size="large"), "hidden_size"),
    (lambda model: (model / "config.json").write_text("{"), "config.json"),
    (lambda model: (model / "config.json").unlink(), "config.json"),
    (lambda model: (model / "tokenizer.json").write_text("[]"), "tokenizer.json"),
]


@pytest.mark.parametrize(("damage", "text"), FILES, ids=range(len(FILES)))
def test_damaged_hostile_and_unknown_model_files(tmp_path: Path, damage: Any, text: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder(), model)
    damage(model)
    with pytest.raises(ModelError, match=text):
        LLM(model, **SETTINGS)


@pytest.mark.parametrize("name", ["/nowhere/model", "nosuch-folder", "model.gguf"])
def test_a_model_that_is_not_there(name: str) -> None:
    with pytest.raises(ModelError, match="neither a folder nor a file here"):
        LLM(name, **SETTINGS)


def test_without_a_tokenizer_ids_work_and_text_is_refused() -> None:
    with LLM(folder(), **SETTINGS | {"skip_tokenizer_init": True}) as llm:
        assert llm.get_tokenizer() is None
        with pytest.raises(RequestInvalid, match="text needs a tokenizer"):
            llm.generate("text", greedy(2), use_tqdm=False)
        (output,) = llm.generate(GOOD, greedy(4), use_tqdm=False)
        assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", solo(GOOD, greedy(4)))
        drained(llm)


def test_a_request_that_cannot_be_says_what_to_do() -> None:
    (long,) = some_prompts([300])
    with LLM(folder(), **SETTINGS) as llm, pytest.raises(RequestTooLong, match="shorten the prompt, or raise"):
        llm.generate(long, greedy(None), use_tqdm=False)
