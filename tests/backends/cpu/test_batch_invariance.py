"""A row's bits depend on its own query and visible keys alone, in float32, whatever shares the batch (U54, U92)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.api import UnsupportedError
from pagedkv_cpu import attention, torch_path
from tests.backends.cpu.rig import Rig, layer_spec, pool_spec, shared_backend
from tests.backends.cpu.rig import backend as make_backend

INVARIANT = frozenset({"batch_invariant"})
LAYERS: dict[str, dict[str, Any]] = {
    "demo": {"q_heads": 9, "kv_heads": 3, "k_dim": 64, "v_dim": 64},
    "window": {"q_heads": 4, "kv_heads": 2, "k_dim": 16, "v_dim": 16, "window": 60},
    "all": {"q_heads": 8, "kv_heads": 1, "k_dim": 80, "v_dim": 24, "softcap": 9.0, "sinks": True, "alibi": True},
    "odd": {"q_heads": 7, "kv_heads": 1, "k_dim": 5, "v_dim": 3, "window": 129},
    "wide": {"q_heads": 20, "kv_heads": 1, "k_dim": 8, "v_dim": 8},
}


def rig_for(name: str, seed: int = 0, **changes: Any) -> Rig:
    """A pool of one such layer, poisoned, and what it needs bound."""
    rig = Rig(pool_spec(layer_spec(**LAYERS[name]), features=INVARIANT, num_blocks=200, **changes), seed=seed)
    rng = np.random.default_rng(5)
    heads = rig.layer.q_heads
    params = {key: rng.uniform(0.1, 1, heads) for key in ("sinks", "alibi") if getattr(rig.layer, key)}
    rig.backend.bind(rig.pool, 0, params)
    rig.poison(float("nan"))
    return rig


@pytest.fixture(params=[1, 3])
def threads(request):
    shared_backend()  # which sets the number itself
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", LAYERS)
def test_u54_every_way_to_compute_a_row_gives_its_bits(name, threads):
    length = 301
    rig = rig_for(name)
    seq = rig.sequence(length)
    whole = rig.step((seq, length, length))

    def again(*rows: tuple[Any, int, int]) -> torch.Tensor:
        rig.poison(float("nan"))
        for row, context, count in rows:
            rig.write(row, 0, context - count)
        return rig.step(*rows)

    # decode: each token alone, after a cache of what came before
    for context in (1, 2, 16, 59, 61, 127, 128, 129, 130, 255, 256, 257, 300, 301):
        assert torch.equal(again((seq, context, 1))[0], whole[context - 1]), f"decode at {context}"
    # chunked, at uneven places
    rig.poison(float("nan"))
    ends = [7, 8, 100, 128, 131, 301]
    parts = [rig.step((seq, end, end - start)) for start, end in zip([0, *ends], ends, strict=False)]
    assert torch.equal(torch.cat(parts), whole)
    # first and last of a batch, among prompts and decodes of other lengths
    others = [rig.sequence(n) for n in (3, 300, 129)]
    for order in (0, 3):
        rows = [(others[0], 3, 3), (others[1], 300, 1), (others[2], 129, 40)]
        rows.insert(order, (seq, 290, 1))
        out = again(*rows)
        at = sum(count for _, _, count in rows[:order])
        assert torch.equal(out[at], whole[289]), f"place {order}"
    # 13 sequences of one batch against each one alone
    rows = [(rig.sequence(n), n, 1) for n in range(20, 280, 20)]
    together = again(*rows)
    alone = torch.cat([again(row) for row in rows])
    assert torch.equal(together, alone)


def test_bits_do_not_depend_on_block_ids_or_block_size():
    answers = []
    for seed, size in ((0, 16), (1, 16), (2, 5)):
        rig = rig_for("demo", block_size=size)
        rig.free = [rig.free[i] for i in np.random.default_rng(seed).permutation(len(rig.free))]
        fixed = torch.Generator().manual_seed(77)
        rig.generator = fixed
        seq = rig.sequence(200)
        answers.append((seq.blocks, rig.step((seq, 200, 200))))
    assert answers[0][0] != answers[1][0]
    assert torch.equal(answers[0][1], answers[1][1]) and torch.equal(answers[0][1], answers[2][1])


def test_a_nan_of_a_later_token_changes_no_bit_of_an_earlier_one():
    rig = rig_for("demo")
    seq = rig.sequence(140)
    clean = rig.step((seq, 140, 140))
    for name, value in (("values", float("nan")), ("keys", float("inf")), ("values", float("inf")), ("keys", 1e38)):
        broken = type(seq)(seq.keys.clone(), seq.values.clone(), seq.queries, seq.blocks)
        getattr(broken, name)[131] = value
        assert torch.equal(rig.step((broken, 140, 140))[:131], clean[:131]), (name, value)


@pytest.mark.parametrize("kernels", ["torch"], indirect=True)
def test_a_processor_that_fails_the_check_declares_less(monkeypatch, caplog):
    monkeypatch.setattr(attention, "same_bits", lambda width, heights: False)
    made = make_backend()
    assert "batch_invariant" not in made.capabilities().features
    assert "batch_invariant" in caplog.text
    with pytest.raises(UnsupportedError, match="batch_invariant"):
        made.alloc_pool(pool_spec(features=INVARIANT))
    assert made.alloc_pool(pool_spec()).num_blocks == 64


@pytest.mark.parametrize("kernels", ["torch"], indirect=True)
def test_one_height_is_taken_where_heights_differ(monkeypatch):
    monkeypatch.setattr(attention, "same_bits", lambda width, heights: len(heights) == 1)
    assert torch_path._find_heights((64,)) == (True, True)
    rig = Rig(pool_spec(layer_spec(q_heads=9, kv_heads=3)), made=make_backend())
    seq = rig.sequence(140)
    whole = rig.step((seq, 140, 140))
    assert np.abs(whole.double().numpy() - rig.expected(seq, 140, 140)).max() < 5e-6
    assert torch.equal(rig.step((seq, 140, 1))[0], whole[139])


def test_the_check_tells_products_that_depend_on_height(monkeypatch):
    true_bmm = torch.bmm

    def other(a, b):
        return true_bmm(a, b) * (1 + 1e-6 * (a.shape[1] == 4))

    assert attention.same_bits(64, (4, 8, 16))
    monkeypatch.setattr(torch, "bmm", other)
    assert not attention.same_bits(64, (4, 8, 16)) and attention.same_bits(64, (8, 16))
