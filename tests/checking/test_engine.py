"""A whole engine under `PAGEDKV_CHECK=1`: no law breaks, and the answers are those without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from pagedkv import LLM
from pagedkv.checking import CheckedBackend
from pagedkv.checking.batch import BatchLaws
from tests.helpers.engine_rig import (
    drained,
    engine,
    folder,
    greedy,
    seeded,
    some_prompts,
    token_ids,
    transformers_greedy,
)
from tests.helpers.tiny_models import BOS

SMALL = {"num_blocks": 16, "block_size": 4, "max_model_len": 40, "max_num_batched_tokens": 12}


def traffic(llm: LLM) -> list[list[list[int]]]:
    """Chunks of prompts, preemption, hits, three samples of one prompt, and an abort."""
    prompts = some_prompts([22, 17, 9, 14, 3])
    answers = [token_ids(llm.generate(prompts, greedy(10), use_tqdm=False))]
    for _ in range(2):
        (again,) = llm.generate([prompts[0]], greedy(2), use_tqdm=False)
        answers.append(token_ids([again]))
    assert again.num_cached_tokens == 20
    (several,) = llm.generate([prompts[0][:9]], seeded(4, 10, n=3), use_tqdm=False)
    answers.append([sample.token_ids for sample in several.outputs])
    key = llm.engine.add_request(prompts[1], greedy(12))
    llm.engine.step()
    llm.engine.abort_request(key)
    return answers


@pytest.mark.parametrize("family", ["llama", "mistral_window"])
def test_an_engine_breaks_no_law_and_answers_as_without_the_checker(family, monkeypatch):
    with engine(family, **SMALL) as llm:
        expected = traffic(llm)
    checked = []
    look = BatchLaws.check
    monkeypatch.setattr(BatchLaws, "check", lambda self: checked.append(self) or look(self))
    monkeypatch.setenv("PAGEDKV_CHECK", "1")
    with engine(family, **SMALL) as llm:
        assert isinstance(llm.engine.parts.runner.backend, CheckedBackend)
        assert traffic(llm) == expected
        assert llm.engine.scheduler.num_preemptions > 0
        drained(llm)
    assert len(checked) > 20


def test_the_command_runs_under_the_checker_and_says_so():
    command = [sys.executable, "-m", "pagedkv.cli.main", "generate", str(folder()), "--prompt", "hello", "--json"]
    options = ["--max-tokens", "4", "--ignore-eos", "--dtype", "float32"]
    backend = ["--backend", "cpu", "--backend-option", "threads=1"]
    environment = os.environ | {"PAGEDKV_CHECK": "1"}
    done = subprocess.run([*command, *options, *backend], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("every call of backend cpu is checked") == 1
    assert json.loads(done.stdout)["token_ids"] == transformers_greedy([BOS, *b"hello"], 4)
