"""U46: an empty prompt is that request's error, in every form; the next one is answered."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedkv import LLM
from pagedkv.errors import RequestInvalid
from tests.helpers.engine_rig import SETTINGS, drained, folder, greedy, solo
from tests.helpers.tiny_models import BOS


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model whose tokenizer puts nothing in front of a text."""
    copy: Path = tmp_path_factory.mktemp("no_bos") / "model"
    shutil.copytree(folder(), copy)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["post_processor"] = None
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    with LLM(copy, **SETTINGS) as made:
        yield made


EMPTY: list[Any] = [
    "",
    [""],
    [[]],
    {"prompt": ""},
    {"prompt_token_ids": []},
    [{"prompt": ""}],
    [{"prompt_token_ids": []}],
    np.array([], np.int32),
    np.zeros((1, 0), np.int64),
    ["good", ""],
    [[1, 2], []],
]


@pytest.mark.parametrize("prompts", EMPTY, ids=repr)
def test_u46_refused_by_name_and_the_engine_goes_on(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestInvalid, match="the prompt is empty: give at least one token") as caught:
        llm.generate(prompts, greedy(2), use_tqdm=False)
    assert caught.value.field == "prompt"
    if len(prompts) == 2:
        assert str(caught.value).startswith("prompt 1: ")
    drained(llm)
    (output,) = llm.generate("ab", greedy(2), use_tqdm=False)
    assert output.outputs[0].token_ids == solo(output.prompt_token_ids, greedy(2))
    assert len(output.prompt_token_ids) == 2


@pytest.mark.parametrize("prompts", [[], ()])
def test_u46_no_prompts_are_no_outputs(llm: LLM, prompts: Any) -> None:
    assert llm.generate(prompts, greedy(2), use_tqdm=False) == []


def test_u46_a_start_token_makes_an_empty_text_a_prompt() -> None:
    with LLM(folder(), **SETTINGS) as llm:
        (output,) = llm.generate("", greedy(2), use_tqdm=False)
        assert output.prompt_token_ids == [BOS]
        drained(llm)
