"""The contract grows by minors: an older plugin on a newer core (G1), a newer plugin on this core (G3)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv import plugins
from pagedkv.api import Batch, GroupSpec, LayerSpec, Limits, PoolSpec, UnsupportedError, needs
from pagedkv.core.negotiation import Requirements, negotiate
from tests.helpers.engine_rig import engine, greedy, solo, token_ids
from tests.helpers.grown import FEATURE, FIELD, grown
from tests.helpers.template_plugins import site

PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
LAYER = LayerSpec(index=0, q_heads=4, kv_heads=2, k_dim=8, v_dim=8, scale=0.3)


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)
    monkeypatch.syspath_prepend(str(site()))


def test_g3_a_plugin_of_1_99_works_here_and_what_this_core_does_not_know_is_said(caplog):
    caplog.set_level(logging.INFO, logger="pagedkv")
    with engine(backend="tomorrow", backend_options=None) as llm:
        outputs = llm.generate(PROMPTS, greedy(6), use_tqdm=False)
    assert token_ids(outputs) == [solo(prompt, greedy(6)) for prompt in PROMPTS]
    for record, field in (("DeviceInfo", "numa_node"), ("Capabilities", "tiers"), ("PoolCost", "staging")):
        assert f"{record}: this core does not know {field}; ignored" in caplog.text


def test_g3_a_feature_of_tomorrow_is_declared_and_never_chosen():
    can = plugins.offer(plugins.select("tomorrow"))
    assert "a_feature_of_tomorrow" in can.features
    assert "a_feature_of_tomorrow" not in negotiate(can, Requirements(layers=(LAYER,)), backend="tomorrow").features


def attended(name: str, core: Callable[[Any], Any]) -> np.ndarray:
    """One step of two sequences, its records passed through `core` first."""
    options = {"threads": 1} if name == "cpu" else {}
    backend = plugins.create(plugins.select(name), options)
    rng = np.random.default_rng(7)
    q, k, v = (torch.from_numpy(rng.standard_normal((5, heads, 8), np.float32)) for heads in (4, 2, 2))
    out = torch.zeros(5, 4, 8)
    group = GroupSpec(layers=(LAYER,), block_size=16, kv_dtype="fp32")
    limits = Limits(rows=2, tokens=5, context=16)
    spec = PoolSpec(groups=(group,), num_blocks=3, dtype="fp32", limits=limits)
    batch = Batch(
        num_seqs=2,
        num_tokens=5,
        cu_q=np.array([0, 3, 5], np.int32),
        ctx_len=np.array([3, 2], np.int32),
        block_table=np.array([[0], [1], [2]], np.int32),
        rows=np.array([1, 2], np.int32),
        slots=np.array([16, 17, 18, 32, 33], np.int64),
        max_q=3,
        max_ctx=3,
    )
    pool = backend.alloc_pool(core(spec))
    backend.attend(backend.plan(pool, 0, core(batch)), 0, q, k, v, out)
    backend.synchronize()
    assert backend.pool_cost(core(spec)) == backend.pool_cost(spec)
    pool.close()
    backend.close()
    return out.numpy()


@pytest.mark.parametrize("name", ["template", "cpu"])
def test_g1_a_core_with_one_more_field_changes_nothing_for_a_plugin_of_today(name):
    today = attended(name, lambda record: record)
    assert np.abs(today).max() > 0.1
    np.testing.assert_array_equal(attended(name, grown), today)


@pytest.mark.parametrize("name", ["template", "cpu"])
def test_g1_what_a_new_field_asks_for_is_refused_before_the_backend_sees_it(name):
    can = plugins.offer(plugins.select(name))
    assert needs(grown(LAYER)) == () and needs(grown(LAYER, 3)) == (FEATURE,)
    chosen = negotiate(can, Requirements(layers=(grown(LAYER),)), backend=name)
    assert FEATURE not in chosen.features
    with pytest.raises(
        UnsupportedError, match=f"backend {name} does not support feature that layer 0 needs='{FEATURE}'"
    ):
        negotiate(can, Requirements(layers=(grown(LAYER, 3),)), backend=name)


def test_the_grown_records_are_those_of_today_with_one_more_field():
    more = grown(PoolSpec(groups=(), num_blocks=2, dtype="fp32", limits=Limits(rows=1, tokens=1, context=1)))
    assert isinstance(more, PoolSpec) and getattr(more, FIELD) is None and getattr(more.limits, FIELD) is None
