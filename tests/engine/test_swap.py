"""Swap to host memory, whole engines: what was moved away and back answers as if it had never moved (U23, U25, U35)."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from pagedkv import LLM, RequestOutput
from pagedkv.api import Pool, PoolSpec
from pagedkv.conformance.loopback.backend import LoopbackBackend
from pagedkv.core.request import Request, State, pack
from pagedkv.errors import DeviceError, EngineDead, OutOfDeviceMemory
from tests.helpers.engine_rig import SETTINGS, fail_at, folder, greedy, solo, some_prompts, token_ids
from tests.helpers.swap_rig import (
    ORDERS,
    answers,
    backend,
    departing,
    finish,
    request_of,
    run,
    small,
    swapping,
    undisturbed,
)

# -- the same answers --------------------------------------------------------------------------------------------------

AXES: dict[str, tuple[Any, ...]] = {
    "on": ("cpu", *ORDERS),
    "block_size": (1, 3, 4, 16),
    "swap_blocks": (0, 1, 2, 50),
    "preemption_mode": ("swap", "recompute", "auto"),
    "enable_host_caching": (True, False),
    "enable_prefix_caching": (True, False),
    "enable_chunked_prefill": (True, False),
    "segment": (2, 50),
    "max_preemptions": (1, 4),
}
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def _pairs(one: dict[str, Any]) -> set[Pair]:
    return set(itertools.combinations(one.items(), 2))


def combinations() -> list[dict[str, Any]]:
    """Settings in which every two values of two axes stand together once: the best of some random ones, repeatedly."""
    rng = random.Random(7)
    left = {
        ((a, x), (b, y)) for a, b in itertools.combinations(AXES, 2) for x, y in itertools.product(AXES[a], AXES[b])
    }
    chosen: list[dict[str, Any]] = []
    while left:
        (a, x), (b, y) = min(left, key=repr)
        tries = [{axis: rng.choice(values) for axis, values in AXES.items()} | {a: x, b: y} for _ in range(30)]
        chosen.append(max(tries, key=lambda one: len(_pairs(one) & left)))
        left -= _pairs(chosen[-1])
    return chosen


def _name(one: dict[str, Any]) -> str:
    return "-".join(str(value) for value in one.values())


@pytest.mark.parametrize("settings", combinations(), ids=_name)
def test_whoever_is_preempted_answers_as_if_nobody_had_been(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """U23, U25: ids, text, log-probabilities, prompt log-probabilities and random stream, exactly."""
    settings = dict(settings)
    on, block_size, segment = (settings.pop(name) for name in ("on", "block_size", "segment"))
    monkeypatch.setattr("pagedkv.engine.swap.SEGMENT_BYTES", segment * block_size * 3 * 2 * 2 * 12 * 4)
    with swapping(on, block_size, **settings) as llm:
        outputs = run(llm)
        assert answers(outputs) == undisturbed(on)
        metrics = llm.metrics()
        assert metrics.preemptions == sum(output.metrics.num_preemptions for output in outputs) >= 1
        assert metrics.swaps == sum(output.metrics.num_swaps for output in outputs)
        if settings["swap_blocks"] == 0 or settings["preemption_mode"] == "recompute":
            assert metrics.swaps == 0
        if settings["swap_blocks"] == 50 and settings["preemption_mode"] == "swap":
            assert metrics.swaps >= 1 and metrics.blocks_saved >= 1


# -- ends, everywhere --------------------------------------------------------------------------------------------------

LONG = some_prompts([8, 8, 8, 6], seed=3)
LENGTHS = [8, 16, 16, 4]
"""The third has to make room, comes back when the first ends, beside the second; the fourth waits for a row."""


def _place(llm: LLM, request: Request) -> str:
    return "departing" if departing(llm, request) else request.state.value


def _until(llm: LLM, keys: list[int], place: str) -> tuple[int, dict[int, RequestOutput]]:
    """Step until one of the requests is at `place`; its key, and what finished on the way."""
    done: dict[int, RequestOutput] = {}
    for _ in range(200):
        for key in keys[::-1]:
            if key not in done and _place(llm, request_of(llm, key)) == place:
                return key, done
        done |= {key: output for key, output in llm.engine.step() if output.finished}
    raise AssertionError(f"nobody was ever {place}")


PLACES = ["waiting", "running", "departing", "swapped", "loading"]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("caching", [True, False])
def test_an_abort_wherever_the_blocks_are_leaves_the_others_their_answers(place: str, caching: bool) -> None:
    """U35: and nothing behind, on either level, whatever is still on its way."""
    with swapping("late", num_blocks=11, max_num_seqs=3, enable_prefix_caching=caching) as llm:
        keys = [llm.engine.add_request(p, greedy(n)) for p, n in zip(LONG, LENGTHS, strict=True)]
        key, done = _until(llm, keys, place)
        output = llm.engine.abort_request(key)
        assert output is not None and output.outputs[0].finish_reason == "abort"
        done |= finish(llm)
        for each, prompt, count in zip(keys, LONG, LENGTHS, strict=True):
            expected = solo(prompt, greedy(count))
            if each == key:
                assert output.outputs[0].token_ids == expected[: len(output.outputs[0].token_ids)]
            else:
                assert done[each].outputs[0].token_ids == expected


@pytest.mark.parametrize("place", PLACES[1:])
def test_an_engine_can_be_closed_wherever_the_blocks_are(place: str) -> None:
    with LLM(folder(), **SETTINGS | backend("late") | small() | {"swap_blocks": 50, "num_blocks": 11}) as llm:
        llm.engine.scheduler.price.mode = "swap"
        keys = [llm.engine.add_request(p, greedy(n)) for p, n in zip(LONG, LENGTHS, strict=True)]
        _until(llm, keys, place)
        llm.close()
        with pytest.raises(EngineDead, match="it was closed"):
            llm.engine.step()


@pytest.mark.parametrize("on", ["late", "cpu"])
@pytest.mark.parametrize("at", range(30, 78, 12))
def test_an_interrupt_while_blocks_move_loses_nothing(on: str, at: int) -> None:
    """U25: the interrupted step is computed again, whatever was swapped, on its way, or had just come back."""
    with swapping(on, num_blocks=11, max_num_seqs=3) as llm:
        keys = [llm.engine.add_request(p, greedy(n)) for p, n in zip(LONG, LENGTHS, strict=True)]
        fail_at(llm, at, KeyboardInterrupt)
        done: dict[int, RequestOutput] = {}
        with pytest.raises(KeyboardInterrupt):
            while llm.engine.has_unfinished_requests():
                done |= dict(llm.engine.step())
        llm.engine.scheduler.check()
        done |= finish(llm)
        for key, prompt, count in zip(keys, LONG, LENGTHS, strict=True):
            assert done[key].outputs[0].token_ids == solo(prompt, greedy(count))


@pytest.mark.parametrize("place", ["departing", "loading"])
def test_a_device_that_fails_while_blocks_move_ends_the_engine_cleanly(place: str) -> None:
    with LLM(folder(), **SETTINGS | backend("late") | small() | {"swap_blocks": 50, "num_blocks": 11}) as llm:
        llm.engine.scheduler.price.mode = "swap"
        keys = [llm.engine.add_request(p, greedy(n)) for p, n in zip(LONG, LENGTHS, strict=True)]
        _until(llm, keys, place)
        queues = llm.engine.parts.runner.backend._queues
        queues.fail(DeviceError("it fell off"))
        with pytest.raises(EngineDead, match="it fell off"):
            finish(llm)


# -- the second level of the prefix cache ------------------------------------------------------------------------------

DOCUMENTS = some_prompts([16] * 6, seed=5)


def _ask(llm: LLM, prompt: list[int], salt: str | None = None) -> RequestOutput:
    """Answer one prompt, check the answer, and let everything that moves arrive."""
    item = {"prompt_token_ids": prompt, "cache_salt": salt}
    (output,) = llm.generate(item, greedy(3), use_tqdm=False)
    assert output.outputs[0].token_ids == solo(prompt, greedy(3))
    llm.engine.settle()
    return output


@pytest.mark.parametrize(("on", "block_size"), [("cpu", 4), ("late", 1), ("late", 4), ("early", 3), ("random1", 16)])
def test_a_prompt_that_the_device_evicted_comes_back_from_the_host(on: str, block_size: int) -> None:
    documents = some_prompts([17] * 5, seed=5)
    blocks = 16 // block_size  # the last token is computed in any case
    with swapping(on, block_size, swap_blocks=100) as llm:
        first = _ask(llm, documents[0])
        for document in documents[1:]:
            _ask(llm, document)
        before = llm.metrics()
        again = _ask(llm, documents[0])
        assert (first.num_cached_tokens, first.num_host_cached_tokens) == (0, 0)
        assert again.num_cached_tokens == again.num_host_cached_tokens == blocks * block_size
        after = llm.metrics()
        assert after.blocks_fetched - before.blocks_fetched == blocks
        computed = 17 - blocks * block_size + 2  # the rest of the prompt, and two tokens of the answer
        assert after.computed_tokens - before.computed_tokens == computed


def test_a_prefix_may_lie_on_both_levels() -> None:
    """What is left on the device is not fetched; the counts tell device and host apart."""
    with swapping(swap_blocks=100) as llm:
        for document in (DOCUMENTS[0], DOCUMENTS[1][:12], DOCUMENTS[2][:12]):
            _ask(llm, document)
        before = llm.metrics().blocks_fetched
        output = _ask(llm, [*DOCUMENTS[0], 1])
        assert (output.num_cached_tokens, output.num_host_cached_tokens) == (16, 8)
        assert llm.metrics().blocks_fetched - before == 2


def test_the_host_forgets_what_was_used_longest_ago() -> None:
    """It has room for four documents: of six, the first one is nowhere, the fourth one only there."""
    with swapping(swap_blocks=16) as llm:
        for document in DOCUMENTS:
            _ask(llm, document)
        assert llm.metrics().host.cached == 16
        assert _ask(llm, DOCUMENTS[0]).num_cached_tokens == 0
        output = _ask(llm, DOCUMENTS[3])
        assert output.num_cached_tokens == output.num_host_cached_tokens == 12


def test_the_device_forgets_what_was_used_longest_ago_whatever_was_saved() -> None:
    with swapping(swap_blocks=100) as llm:
        for document in DOCUMENTS[:4]:
            _ask(llm, document)
        index = llm.engine.scheduler.index
        found = []
        for document in DOCUMENTS[:4]:
            hashes: list[bytes] = []
            index.extend(hashes, index.root(), pack(document).tobytes(), 16)
            found.append(len(index.find(hashes, 4)))
        assert found == [0, 0, 4, 4]


def test_u09_the_host_keeps_tenants_apart() -> None:
    with swapping(swap_blocks=100) as llm:
        for salt in ("a", "b"):
            _ask(llm, DOCUMENTS[0], salt)
        for document in DOCUMENTS[1:]:
            _ask(llm, document)
        found = [_ask(llm, DOCUMENTS[0], salt).num_host_cached_tokens for salt in ("a", "c", None, "b")]
        assert found == [12, 0, 0, 12]


@pytest.mark.parametrize("way", ["reset_prefix_cache", "flush"])
def test_both_levels_can_be_emptied(way: str) -> None:
    with swapping(swap_blocks=100) as llm:
        for document in DOCUMENTS[:4]:
            _ask(llm, document)
        before = llm.metrics()
        assert before.device.cached > 0 and before.host.cached > 0
        if way == "flush":
            llm.engine.scheduler.flush()
        else:
            assert llm.reset_prefix_cache() == before.device.cached + before.host.cached
        after = llm.metrics()
        assert (after.device.cached, after.host.cached) == (0, 0)
        for document in DOCUMENTS[:4]:
            assert _ask(llm, document).num_cached_tokens == 0


@pytest.mark.parametrize("names", [{"enable_host_caching": False}, {"enable_prefix_caching": False}])
def test_without_caching_on_the_host_nothing_stays_there(names: dict[str, bool]) -> None:
    with swapping(swap_blocks=100, **names) as llm:
        for document in DOCUMENTS:
            _ask(llm, document)
        assert _ask(llm, DOCUMENTS[0]).num_cached_tokens == 0
        assert (llm.metrics().blocks_saved, llm.metrics().host.cached) == (0, 0)


def test_fetching_is_left_where_computing_is_cheaper() -> None:
    """Copies at one byte a second, prompts at a million tokens a second: what lies on the host stays there."""
    with swapping(swap_blocks=100, copy_bandwidth=1, prefill_rate=1e6) as llm:
        for document in DOCUMENTS:
            _ask(llm, document)
        assert llm.metrics().host.cached > 0
        assert _ask(llm, DOCUMENTS[0]).num_cached_tokens == 0
        assert llm.metrics().blocks_fetched == 0


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_unusable_logits_leave_nothing_findable_on_either_level(mode: str) -> None:
    """The request had been preempted and come back: parts of it lie in host memory as well."""
    with swapping("late", num_blocks=10, preemption_mode=mode, max_num_seqs=2) as llm:
        runner, scheduler = llm.engine.parts.runner, llm.engine.scheduler
        keys = [llm.engine.add_request(LONG[at], greedy(16), request_id=str(at)) for at in (0, 1)]
        bad = request_of(llm, keys[1])
        run = runner.run

        def spoiled(step: Any) -> torch.Tensor:
            logits = run(step).clone()
            if bad.num_preemptions and bad.state is State.RUNNING:
                logits[[request is bad for request in scheduler.holders(step)]] = torch.nan
            return logits

        runner.run = spoiled  # type: ignore[method-assign]
        hashes = bad.hashes
        done = finish(llm)
        assert done[keys[0]].outputs[0].token_ids == solo(LONG[0], greedy(16))
        assert (done[keys[1]].outputs[0].finish_reason, bad.num_preemptions) == ("error", 1)
        assert len(hashes) >= 2
        found = [scheduler.index.get(digest) or scheduler.tiers.host_index.get(digest) for digest in hashes]
        assert found == [None] * len(hashes)


# -- whom and how often ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("most", [1, 3])
def test_requests_that_would_evict_each_other_for_ever_all_finish(mode: str, most: int) -> None:
    prompts = some_prompts([8, 8, 8, 8], seed=8)
    with swapping(preemption_mode=mode, max_preemptions=most) as llm:
        outputs = llm.generate(prompts, greedy(20), use_tqdm=False)
        assert token_ids(outputs) == [solo(prompt, greedy(20)) for prompt in prompts]
        counts = [output.metrics.num_preemptions for output in outputs]
        assert 1 <= max(counts) <= most and counts[0] == 0
        swaps = [output.metrics.num_swaps for output in outputs]
        assert swaps == (counts if mode == "swap" else [0] * 4)


def test_who_was_swapped_comes_back_before_anybody_starts() -> None:
    """The fourth arrived when the third had been moved out; it starts after the third is back."""
    with swapping("early", num_blocks=11, max_num_seqs=3) as llm:
        keys = [llm.engine.add_request(p, greedy(n)) for p, n in zip(LONG[:3], LENGTHS[:3], strict=True)]
        third, done = _until(llm, keys, "swapped")
        assert third == keys[2]
        late = llm.engine.add_request(LONG[3], greedy(4))
        while request_of(llm, third).state is State.SWAPPED:
            assert request_of(llm, late).state is State.WAITING
            done |= dict(llm.engine.step())
        done |= finish(llm)
        assert done[third].outputs[0].token_ids == solo(LONG[2], greedy(LENGTHS[2]))
        assert done[late].outputs[0].token_ids == solo(LONG[3], greedy(4))


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allowed", [0, 1, 2])
@pytest.mark.parametrize("measured", [True, False])
def test_host_memory_that_cannot_be_had_is_said_once_and_nobody_suffers(
    allowed: int, measured: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """U25: the pools of 3 blocks after the first `allowed` ones are refused."""
    made: list[PoolSpec] = []
    original = LoopbackBackend.alloc_pool

    def scarce(self: LoopbackBackend, spec: PoolSpec) -> Pool:
        if spec.placement == "host":
            made.append(spec)
            if len(made) > allowed:
                raise OutOfDeviceMemory(requested=1, free=0)
        return original(self, spec)

    monkeypatch.setattr(LoopbackBackend, "alloc_pool", scarce)
    monkeypatch.setattr("pagedkv.engine.swap.SEGMENT_BYTES", 3 * 4 * 3 * 2 * 24 * 4)
    caplog.set_level("INFO", "pagedkv")
    with swapping(copy_bandwidth=None if measured else "1GB") as llm:
        assert answers(run(llm)) == undisturbed("late")
        for document in DOCUMENTS:
            _ask(llm, document)
        usable = llm.engine.scheduler.tiers.host.usable
    assert usable == 3 * max(0, allowed - measured), "what was timed was given back"
    assert caplog.text.count("no more host memory for blocks") == 1
    assert ("remain" if usable else "computed again") in caplog.text
    assert ("copies 0 B/s" in caplog.text) is False


def test_swapping_asked_for_without_host_memory_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with swapping("late", swap_blocks=0):
        pass
    assert caplog.text.count("preemption_mode=swap has no host memory to swap to") == 1
    caplog.clear()
    with swapping("late", swap_blocks=0, preemption_mode="auto"):
        pass
    assert "host memory" not in caplog.text


def test_gauges_and_counters_tell_what_the_lists_hold() -> None:
    with swapping("late", num_blocks=11, max_num_seqs=3) as llm:
        for prompt, count in zip(LONG, LENGTHS, strict=True):
            llm.engine.add_request(prompt, greedy(count))
        seen = set()
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
            scheduler, gauges = llm.engine.scheduler, llm.metrics()
            counts = {name: len(getattr(scheduler, name)) for name in ("running", "waiting", "swapped", "loading")}
            assert counts == {name: getattr(gauges, name) for name in counts}
            seen |= {name for name, count in counts.items() if count}
            held = {block for r in (*scheduler.running, *scheduler.loading) for block in scheduler.rows.held(r.row)}
            saved = {block for r in (*scheduler.swapped, *scheduler.loading) for block in r.saved}
            for level, pool, used in (
                (gauges.device, scheduler.pool, held),
                (gauges.host, scheduler.tiers.host, saved),
            ):
                assert level.used == len(used)
                assert level.used + level.moving + level.cached + level.free == pool.usable
        assert seen == {"running", "waiting", "swapped", "loading"}
        finish(llm)
        total = llm.metrics()
        assert (total.finished, total.output_tokens) == (4, sum(LENGTHS))
        assert (total.blocks_saved, total.blocks_fetched) == (
            scheduler.tiers.num_saved,
            scheduler.tiers.num_fetched,
        )
        assert total.blocks_saved >= total.blocks_fetched >= 1 <= total.swaps
