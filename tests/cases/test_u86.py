"""U86: a backend replaces the user's block size without a word; here an explicit value stays or is refused."""

from __future__ import annotations

import logging

import pytest

from pagedkv.api import LayerSpec, UnsupportedError
from pagedkv.core.negotiation import Requirements, negotiate
from pagedkv_ascend import limits
from pagedkv_ascend.capabilities import declared
from tests.helpers.cpu_plugins import cpu_plugin
from tests.helpers.engine_rig import engine, greedy, solo, token_ids


@pytest.fixture(autouse=True)
def _installed(tmp_path, monkeypatch):
    for name, sizes in (("both", {16, 128}), ("large", {128})):
        cpu_plugin(tmp_path / name, name, block_sizes=(frozenset(sizes),), preferred_block_size=128)
        monkeypatch.syspath_prepend(str(tmp_path / name))


def test_u86_what_the_user_gave_stays(caplog):
    caplog.set_level(logging.INFO, logger="pagedkv")
    prompt = list(range(1, 40))
    with engine(backend="both", block_size=16, num_blocks=33) as llm:
        assert llm.engine.parts.choice.block_size == llm.metrics().block_size == 16
        first = llm.generate([prompt], greedy(4), use_tqdm=False)
        again = llm.generate([prompt], greedy(4), use_tqdm=False)
        assert again[0].num_cached_tokens == 32, "short prefixes hit"
        assert token_ids(first) == token_ids(again) == [solo(prompt, greedy(4))]
    assert "block size 16" in caplog.text and "preferred by" not in caplog.text


def test_u86_left_unset_it_is_the_preferred_one_and_a_line_says_so(caplog):
    caplog.set_level(logging.INFO, logger="pagedkv")
    with engine(backend="both", block_size=None, num_blocks=9) as llm:
        assert llm.engine.parts.choice.block_size == llm.metrics().block_size == 128
    assert "block_size 128: preferred by both" in caplog.text and "block size 128" in caplog.text


def test_u86_what_cannot_be_kept_is_an_error():
    said = "backend large does not support block_size=16; accepted: 128; leave it unset for 128"
    with pytest.raises(UnsupportedError, match=said), engine(backend="large", block_size=16):
        pass


@pytest.mark.parametrize(("given", "kept"), [(16, 16), (32, 32), (128, 128), (512, 512), (None, 32)])
def test_u86_the_backend_of_the_reports_keeps_what_it_can_and_says_what_it_chose(given, kept):
    choice = asked_of_ascend(given)
    assert choice.block_size == kept
    assert [note for note in choice.notes if "block_size" in note] == (
        ["block_size 32: preferred by ascend"] if given is None else []
    )


@pytest.mark.parametrize("given", [8, 24, 528])
def test_u86_the_backend_of_the_reports_refuses_the_others(given):
    with pytest.raises(UnsupportedError, match=f"block_size={given}; accepted: multiples of 16 from 16 to 512; .* 32$"):
        asked_of_ascend(given)


def asked_of_ascend(block_size):
    layer = LayerSpec(index=0, q_heads=4, kv_heads=2, k_dim=64, v_dim=64, scale=0.125)
    want = Requirements(layers=(layer,), dtype="bf16", block_size=block_size)
    return negotiate(declared(limits.chip("910B3")), want, backend="ascend")
