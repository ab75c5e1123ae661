"""What breaks in the middle: an interrupt, a device, unusable logits, a close; who pays for it and who does not."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from pagedkv import LLM
from pagedkv.errors import DeviceError, EngineDead, OutOfDeviceMemory, UnsupportedError
from pagedkv_cpu.backend import CpuBackend
from tests.helpers.engine_rig import (
    SETTINGS,
    drained,
    engine,
    fail_at,
    folder,
    greedy,
    seeded,
    solo,
    some_prompts,
    token_ids,
)

PROMPTS = some_prompts([9, 6, 14])
EXPECTED = [solo(prompt, greedy(6)) for prompt in PROMPTS]


@pytest.mark.parametrize("at", [1, 3, 7, 12])
def test_an_interrupt_leaves_the_engine_usable(at: int) -> None:
    with engine() as llm:
        failing = fail_at(llm, at, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, greedy(6), use_tqdm=False)
        assert failing.calls == at
        drained(llm)
        for _ in range(2):
            assert token_ids(llm.generate(PROMPTS, greedy(6), use_tqdm=False)) == EXPECTED


@pytest.mark.parametrize("at", [1, 5, 10])
@pytest.mark.parametrize("tokens", [8, 64])
def test_an_interrupted_step_is_computed_again_for_whoever_stays(at: int, tokens: int) -> None:
    with engine(max_num_batched_tokens=tokens) as llm:
        keys = [llm.engine.add_request(prompt, greedy(6)) for prompt in PROMPTS]
        fail_at(llm, at, KeyboardInterrupt)
        done, interrupts = {}, 0
        while llm.engine.has_unfinished_requests():
            try:
                done |= dict(llm.engine.step())
            except KeyboardInterrupt:
                interrupts += 1
        assert interrupts == 1
        assert token_ids([done[key] for key in keys]) == EXPECTED


@pytest.mark.parametrize("place", ["set_row", "sample", "publish", "append"])
def test_an_interrupt_between_the_parts_of_a_step_loses_nothing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [greedy(6), seeded(3, 6), seeded(4, 6, top_k=30)]
    with engine() as llm:
        scheduler, sampler = llm.engine.scheduler, llm.engine._sampler
        owner, name = {
            "set_row": (sampler, "set_row"),
            "sample": (llm.engine, "_sampler"),
            "publish": (scheduler, "_publish"),
            "append": (scheduler, "_append"),
        }[place]
        original, interrupts = getattr(owner, name), []

        def once(*args: Any) -> Any:
            if len(interrupts) < 1:
                interrupts.append(args)
                raise KeyboardInterrupt
            return original(*args)

        if place == "sample":
            once.set_row = sampler.set_row  # type: ignore[attr-defined]
        keys = [llm.engine.add_request(prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
        monkeypatch.setattr(owner, name, once)
        with pytest.raises(KeyboardInterrupt):
            llm.engine.step()
        done = {}
        while llm.engine.has_unfinished_requests():
            done |= dict(llm.engine.step())
        assert token_ids([done[key] for key in keys]) == [solo(p, q) for p, q in zip(PROMPTS, params, strict=True)]


@pytest.mark.parametrize("error", [DeviceError("the bus fell off"), OutOfDeviceMemory(requested=9, free=1), OSError(5)])
@pytest.mark.parametrize("at", [1, 8])
def test_a_device_failure_ends_everything_with_its_cause(error: Exception, at: int) -> None:
    llm = LLM(folder(), **SETTINGS)
    waiting = llm.engine.add_request(PROMPTS[0], greedy(20))
    fail_at(llm, at, lambda: error)
    with pytest.raises(EngineDead, match="the engine stopped: ") as caught:
        llm.generate(PROMPTS, greedy(6), use_tqdm=False)
    assert caught.value.__cause__ is error
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.abort_request(waiting) is None
    for call in (
        lambda: llm.generate(PROMPTS, greedy(6), use_tqdm=False),
        lambda: next(llm.stream(PROMPTS[0], greedy(6))),
        lambda: llm.engine.add_request(PROMPTS[0], greedy(6)),
        llm.engine.step,
    ):
        with pytest.raises(EngineDead, match=r"stopped earlier: .*make a new one") as again:
            call()
        assert again.value.__cause__ is error
    llm.close()
    llm.close()


def test_nothing_can_be_asked_of_a_closed_engine_and_closing_twice_is_fine() -> None:
    llm = LLM(folder(), **SETTINGS)
    llm.close()
    llm.close()
    with pytest.raises(EngineDead, match="it was closed; make a new one"):
        llm.generate(PROMPTS, greedy(6), use_tqdm=False)


def test_close_ends_an_open_stream_and_a_call_of_another_thread() -> None:
    llm = LLM(folder(), **SETTINGS)
    stream = llm.stream(PROMPTS[0], greedy(200))
    next(stream)
    errors: list[BaseException] = []
    started = threading.Event()

    def other() -> None:
        try:
            for _ in llm.stream(PROMPTS[1], greedy(200)):
                started.set()
        except EngineDead as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    assert started.wait(20)
    llm.close()
    thread.join(20)
    assert not thread.is_alive() and len(errors) == 1
    with pytest.raises(EngineDead, match="it was closed"):
        for _ in stream:
            pass


def test_three_engines_one_after_another_and_two_at_once() -> None:
    for _ in range(3):
        with LLM(folder(), **SETTINGS) as llm:
            assert token_ids(llm.generate(PROMPTS, greedy(6), use_tqdm=False)) == EXPECTED
            drained(llm)
    with LLM(folder(), **SETTINGS) as one, LLM(folder("qwen3"), **SETTINGS) as other:
        assert token_ids(one.generate(PROMPTS, greedy(6), use_tqdm=False)) == EXPECTED
        right = [solo(prompt, greedy(6), "qwen3") for prompt in PROMPTS]
        assert token_ids(other.generate(PROMPTS, greedy(6), use_tqdm=False)) == right
        one.close()
        assert token_ids(other.generate(PROMPTS, greedy(6), use_tqdm=False)) == right


class Spoiled:
    """Makes the logits of one request NaN from its `after`-th output token on."""

    def __init__(self, llm: LLM, label: str, after: int) -> None:
        self._scheduler, self._runner = llm.engine.scheduler, llm.engine.parts.runner
        self._run, self._label, self._after = self._runner.run, label, after
        self._runner.run = self  # type: ignore[method-assign, assignment]

    def __call__(self, step: Any) -> torch.Tensor:
        logits = self._run(step).clone()
        for at, request in enumerate(self._scheduler.holders(step)):
            if request is not None and request.label == self._label and step.output_index[at] >= self._after:
                logits[at, 5] = torch.nan
        return logits

    def heal(self) -> None:
        self._runner.run = self._run  # type: ignore[method-assign]


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_logits_that_are_no_numbers_end_one_request_only(
    after: int, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with engine() as llm:
        spoiled = Spoiled(llm, "1", after)
        if stream:
            pieces = ["", "", ""]
            outputs = [None] * 3
            for number, output in llm.stream(PROMPTS, greedy(6)):
                pieces[number] += output.outputs[0].new_text
                outputs[number] = output  # type: ignore[call-overload]
            assert [o.outputs[0].text for o in outputs] == pieces  # type: ignore[attr-defined]
        else:
            outputs = llm.generate(PROMPTS, greedy(6), use_tqdm=False)  # type: ignore[assignment]
        bad = outputs[1]
        assert bad is not None and bad.outputs[0].finish_reason == "error"
        assert bad.outputs[0].token_ids == EXPECTED[1][:after]
        assert bad.outputs[0].text == llm.get_tokenizer().decode(EXPECTED[1][:after])  # type: ignore[union-attr]
        assert token_ids([outputs[0], outputs[2]]) == [EXPECTED[0], EXPECTED[2]]  # type: ignore[list-item]
        assert "no usable logits" in caplog.text
        spoiled.heal()
        drained(llm)
        outputs = llm.generate(PROMPTS, greedy(6), use_tqdm=False)  # type: ignore[assignment]
        assert token_ids(outputs) == EXPECTED  # type: ignore[arg-type]
        assert [o.num_cached_tokens for o in outputs] == [8, 0, 12], (  # type: ignore[attr-defined]
            "nobody finds blocks behind unusable logits"
        )
        assert llm.engine.stats.output_tokens == 6 + after + 6 + 18, "only tokens that came are counted"


def test_batch_invariance_is_not_promised_where_nobody_has_a_product_that_keeps_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CpuBackend, "op", lambda self, name, spec: None)
    caplog.set_level("INFO", "pagedkv")
    with engine() as llm:
        assert "batch_invariant" not in llm.engine.parts.choice.features
    assert "batch_invariant False: backend cpu has no linear op of its own" in caplog.text
    assert "batch-invariant results off" in caplog.text
    with pytest.raises(UnsupportedError, match="batch_invariant=True cannot be kept"), engine(batch_invariant=True):
        pass
