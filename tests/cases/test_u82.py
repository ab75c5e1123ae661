"""U82: backend names are a closed list with one slot for outsiders; here several third-party ones live side by side."""

from __future__ import annotations

import pytest

from pagedkv import plugins
from tests.helpers.engine_rig import engine, greedy, solo, token_ids
from tests.helpers.template_plugins import DISTRIBUTIONS, NAMES, site

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)
    monkeypatch.syspath_prepend(str(site()))


def test_u82_each_has_its_name_and_distribution():
    found = {f.name: f for f in plugins.discover()}
    assert {name: found[name].distribution for name in NAMES} == DISTRIBUTIONS
    assert not any(found[name].conflicts for name in NAMES)


def test_u82_two_of_them_are_used_in_turn_in_one_process():
    for name in ("template", "second", "cpu", "template"):
        options = {"threads": 1} if name == "cpu" else None
        with engine(backend=name, backend_options=options) as llm:
            assert llm.engine.parts.backend_name == name
            assert type(llm.engine.parts.runner.backend).__module__.startswith(f"pagedkv_{name}")
            outputs = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
        assert token_ids(outputs) == [solo(prompt, greedy(6)) for prompt in PROMPTS]


def test_u82_two_are_open_at_the_same_time():
    with engine(backend="template", backend_options=None) as one, engine(backend="second", backend_options=None) as two:
        for _ in range(2):
            for llm in (one, two):
                outputs = llm.generate(PROMPTS, greedy(3), use_tqdm=False)
                assert token_ids(outputs) == [solo(prompt, greedy(3)) for prompt in PROMPTS]
