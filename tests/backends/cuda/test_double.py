"""The double itself: that it is as unkind as the contract allows, and what swap does on it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pagedkv import LLM
from tests.backends.cuda.double import DelayingRuntime, double
from tests.backends.cuda.test_graph import Step, batch
from tests.backends.cuda.test_pool import spec
from tests.backends.cuda.test_runtime import filled, values
from tests.helpers.delaying import POLLS
from tests.helpers.engine_rig import drained, engine
from tests.helpers.swap_rig import run, small

SEEDS = range(1, 13)


def pairs(*rows):
    return np.array(rows, np.int32)


# -- moments -----------------------------------------------------------------------------------------------------------


def seen_by_compute(seed, *, waits):
    """What compute reads of a block that a copy clears, and the order in which two copies ran."""
    backend = double(runtime=DelayingRuntime(seed))
    pool = filled(backend, spec())
    events = [backend.copy_blocks(pool, pool, pairs([0, 5])), backend.copy_blocks(pool, pool, pairs([1, 6]))]
    backend.memory()  # calls in between, each of them a moment
    if waits:
        for event in events:
            backend.wait(event)
    seen = values(pool)[5]
    backend.synchronize()
    assert values(pool)[5:7] == [0, 1]
    return seen, tuple(backend._runtime.ran)


def test_compute_sees_a_copy_for_certain_only_after_it_waited():
    assert {seen_by_compute(seed, waits=False)[0] for seed in SEEDS} == {0, 5}
    assert {seen_by_compute(seed, waits=True)[0] for seed in SEEDS} == {0}


def test_copies_that_nothing_orders_run_in_both_orders():
    assert {seen_by_compute(seed, waits=False)[1] for seed in SEEDS} == {(0, 1), (1, 0)}


def there_and_back(seed, *, ordered):
    """Block 1 goes to the host and from there to block 5, the second copy `after` the first or not."""
    backend = double(runtime=DelayingRuntime(seed))
    pool, host = filled(backend, spec()), backend.alloc_pool(spec(placement="host"))
    out = backend.copy_blocks(pool, host, pairs([1, 1]))
    backend.wait(backend.copy_blocks(host, pool, pairs([1, 5]), after=out if ordered else backend.record()))
    return values(pool)[5]


def test_a_way_there_and_back_without_after_is_a_race_that_shows():
    assert {there_and_back(seed, ordered=True) for seed in SEEDS} == {1}
    assert {there_and_back(seed, ordered=False) for seed in SEEDS} == {1, 255}, "new host memory is no zeros"


def test_a_source_that_is_overwritten_too_early_shows():
    seen = set()
    for seed in SEEDS:
        backend = double(runtime=DelayingRuntime(seed))
        pool, host = filled(backend, spec()), backend.alloc_pool(spec(placement="host"))
        backend.copy_blocks(pool, host, pairs([3, 3]))
        backend.memory()
        pool.rows[3] = 77  # compute of the caller, who did not wait
        backend.synchronize()
        seen.add(values(host)[3])
    assert seen == {3, 77}


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_events_say_no_for_a_while_and_yes_once_joined(seed):
    backend = double(runtime=DelayingRuntime(seed))
    backend.alloc_pool(spec())
    asked, joined = backend.record(), backend.record()
    answers = [asked.done() for _ in range(5)]
    assert answers == sorted(answers) and answers[-1]
    assert seed is not None or answers.index(True) == POLLS - 1
    joined.join()
    assert joined.done()
    left = backend.record()
    backend.synchronize()
    assert left.done()


# -- recordings --------------------------------------------------------------------------------------------------------


def test_a_recording_calls_nobody_again_and_follows_the_last_refresh():
    step, calls = Step(double()), []

    def counted():
        calls.append(1)
        step()

    graph = step.graphs.capture(counted, [step.plan])
    for contexts in ((1, 1, 1), (1,), (1, 1)):
        step.graphs.refresh(step.plan, batch(*contexts))
        step.out.fill_(float("nan"))
        graph.replay()
        rows = len(contexts)
        assert torch.allclose(step.out[:rows], step.first_key_alone()[:rows], atol=1e-6)
        assert bool((step.out[rows:] == 0).all())
    assert len(calls) == 1


def test_what_the_host_computed_while_recording_is_frozen():
    step, factor = Step(double()), [2.0]

    def scaled():
        step()
        step.out.mul_(factor[0])

    graph = step.graphs.capture(scaled, [step.plan])
    step.graphs.refresh(step.plan, batch(1))
    factor[0] = 100.0
    graph.replay()
    assert torch.allclose(step.out[:1], 2 * step.first_key_alone()[:1], atol=1e-6)


def test_a_recording_that_asks_for_a_value_is_refused_and_runs_eagerly(caplog):
    step = Step(double())

    def asking():
        step()
        if float(step.out.sum()) > 1e9:
            step.out.zero_()

    step.graphs.capture(asking, [step.plan]).replay()
    assert "could not be captured" in caplog.text and "_local_scalar_dense" in caplog.text


# -- a whole engine ----------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The doubles as an installed distribution."""
    place = Path(__file__).parents[2] / "helpers" / "kit_run.py"
    found = importlib.util.spec_from_file_location("kit_run", place)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    monkeypatch.setenv("PYTHONPATH", "")  # both are changed by what follows, and put back
    monkeypatch.setattr(sys, "path", list(sys.path))
    module.install(tmp_path)


def tokens(llm: LLM):
    return [[one.token_ids for one in output.outputs] for output in run(llm)]


def test_swapping_gives_the_tokens_of_a_pool_that_holds_everything(installed):
    def on(seed):
        options = {"seed": seed}
        return {"backend": "cuda-double", "backend_options": options, "copy_bandwidth": "1GB", "dtype": "float32"}

    with engine(**on(0), num_blocks=200, max_model_len=32, block_size=4, enable_prefix_caching=False) as llm:
        wanted = tokens(llm)
        assert llm.metrics().preemptions == 0
    for seed in (0, 1):
        with engine(**on(seed), **small(), swap_blocks=50, preemption_mode="swap") as llm:
            assert tokens(llm) == wanted, f"seed {seed}"
            assert llm.metrics().preemptions > 0
            drained(llm)
