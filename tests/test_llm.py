"""`LLM` as people use it: outputs, streams, priorities, threads, progress on stderr."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

import pagedkv
from pagedkv import LLM, RequestOutput, SamplingParams
from pagedkv.errors import EngineDead
from tests.helpers.engine_rig import (
    SETTINGS,
    drained,
    engine,
    folder,
    greedy,
    seeded,
    solo,
    some_prompts,
    token_ids,
    transformers_greedy,
)
from tests.helpers.tiny_models import BOS, EOS

TEXT = "Příliš žluťoučký kůň 日本 🐎"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(folder(), **SETTINGS) as made:
        yield made
        drained(made)


def test_the_package_offers_the_names_people_know() -> None:
    assert pagedkv.LLM is LLM and pagedkv.SamplingParams is SamplingParams
    assert set(pagedkv.__all__) <= set(dir(pagedkv))


def test_an_output_has_the_fields_people_know(llm: LLM) -> None:
    before = time.monotonic()
    outputs = llm.generate(["hello", {"prompt": TEXT}, [7, 8, 9]], greedy(5), use_tqdm=False)
    assert [o.request_id for o in outputs] == ["0", "1", "2"]
    assert [o.prompt for o in outputs] == ["hello", TEXT, None]
    assert outputs[0].prompt_token_ids == [BOS, *b"hello"]
    assert outputs[1].prompt_token_ids == [BOS, *TEXT.encode()]
    for output in outputs:
        assert output.finished and len(output.outputs) == 1
        completion = output.outputs[0]
        assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
        assert completion.token_ids == transformers_greedy(output.prompt_token_ids, 5)
        assert completion.finished()
        metrics = output.metrics
        moments = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time]
        assert None not in moments
        assert before <= moments[0] and moments == sorted(moments) and moments[-1] <= time.monotonic()  # type: ignore[operator,type-var]
        assert metrics.time_in_queue == moments[1] - moments[0]  # type: ignore[operator]
        assert metrics.time_to_first_token == moments[2] - moments[0]  # type: ignore[operator]


def test_the_default_parameters_are_sixteen_random_tokens(llm: LLM) -> None:
    (output,) = llm.generate([1, 2, 3], use_tqdm=False)
    assert 1 <= len(output.outputs[0].token_ids) <= 16


def test_parameters_for_each_prompt(llm: LLM) -> None:
    prompts = some_prompts([4, 5, 6])
    params = [greedy(2), seeded(4, 7), greedy(5, detokenize=False)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert token_ids(outputs) == [solo(p, q) for p, q in zip(prompts, params, strict=True)]
    assert outputs[2].outputs[0].text == "" != outputs[1].outputs[0].text


def test_special_tokens_are_left_out_unless_wanted(llm: LLM) -> None:
    prompt, _ = some_prompts([4, 5])
    for seed in range(200):
        ids = solo(prompt, seeded(seed, 12, temperature=9.0))
        if EOS in ids[:-1] or BOS in ids[:-1]:
            break
    hidden, shown = (
        llm.generate(prompt, seeded(seed, 12, temperature=9.0, skip_special_tokens=skip), use_tqdm=False)[0].outputs[0]
        for skip in (True, False)
    )
    assert hidden.token_ids == shown.token_ids == ids
    assert "<eos>" in shown.text or "<bos>" in shown.text
    assert "<eos>" not in hidden.text and "<bos>" not in hidden.text


# -- streams -----------------------------------------------------------------------------------------------------------


def followed(llm: LLM, prompts: list, params: list[SamplingParams]) -> tuple[list[str], list[RequestOutput]]:
    """Pieces put together and last outputs, each step's claims checked on the way."""
    pieces, last = [""] * len(prompts), [None] * len(prompts)
    for number, output in llm.stream(prompts, params):
        completion = output.outputs[0]
        pieces[number] += completion.new_text
        assert completion.text == pieces[number]
        assert last[number] is None or not last[number].finished  # type: ignore[attr-defined]
        assert output.finished == completion.finished()
        last[number] = output  # type: ignore[call-overload]
    return pieces, last  # type: ignore[return-value]


def test_pieces_of_a_stream_are_the_text(llm: LLM) -> None:
    prompts = some_prompts([3, 12, 7, 20, 5, 9])
    params = [seeded(n, 20, temperature=3.0) for n in range(4)] + [greedy(20), greedy(1)]
    texts = [o.outputs[0].text for o in llm.generate(prompts, params, use_tqdm=False)]
    pieces, last = followed(llm, prompts, params)
    assert pieces == texts
    assert [o.outputs[0].token_ids for o in last] == [solo(p, q) for p, q in zip(prompts, params, strict=True)]
    decode = llm.get_tokenizer().decode  # type: ignore[union-attr]
    assert [decode(o.outputs[0].token_ids) for o in last] == texts


def _saying(llm: LLM, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the model says the bytes of `text`, whatever it is asked."""
    runner, answer = llm.engine.parts.runner, text.encode()
    run = runner.run

    def forced(step):  # type: ignore[no-untyped-def]
        logits = run(step).clone()
        for at, index in enumerate(step.output_index.tolist()):
            logits[at, answer[index % len(answer)]] = 1e9
        return logits

    monkeypatch.setattr(runner, "run", forced)


@pytest.mark.parametrize("count", [len(TEXT.encode()), len(TEXT.encode()) - 2])
def test_a_stream_never_shows_half_a_character(llm: LLM, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    _saying(llm, TEXT, monkeypatch)
    prompt, _ = some_prompts([6, 5])
    shown = []
    for _, output in llm.stream([prompt], greedy(count)):
        shown.append(output.outputs[0].new_text)
        whole = output.outputs[0]
    whole_text = TEXT if count == len(TEXT.encode()) else TEXT[:-1] + "\ufffd"
    assert "".join(shown) == whole.text == whole_text
    assert not any("\ufffd" in piece for piece in shown[:-1])
    assert [len(piece) for piece in shown[:-1]].count(0) > 5, "bytes inside a character show nothing yet"


def test_closing_a_stream_aborts_what_is_left() -> None:
    with engine() as llm:
        stream = llm.stream(some_prompts([5, 6, 7]), greedy(50))
        next(stream)
        assert len(llm.engine.scheduler.running) == 3
        stream.close()  # type: ignore[attr-defined]
        drained(llm)
        for _, _output in llm.stream(some_prompts([5]), greedy(50)):
            break
        del _, _output
        drained(llm)


def test_a_stream_that_is_open_stops_nobody() -> None:
    prompts = some_prompts([5, 9, 7])
    with engine() as llm:
        stream = llm.stream(prompts[:1], greedy(30))
        seen = [next(stream)[1].outputs[0].token_ids]
        assert token_ids(llm.generate(prompts[1:], greedy(8), use_tqdm=False)) == [
            solo(p, greedy(8)) for p in prompts[1:]
        ]
        inner = list(llm.stream(prompts[1], greedy(4)))
        assert inner[-1][1].outputs[0].token_ids == solo(prompts[1], greedy(4))
        seen += [output.outputs[0].token_ids for _, output in stream]
        assert seen[-1] == solo(prompts[0], greedy(30))
        assert [len(ids) for ids in seen] == list(range(1, 31)), "no output was lost to the other calls"


def test_a_call_of_another_thread_is_answered_while_a_long_one_runs() -> None:
    long, short = some_prompts([5, 6])
    with engine() as llm:
        shorts: list[int] = []
        stream = llm.stream(long, greedy(150))
        next(stream)

        def ask() -> None:
            for _ in range(3):
                assert token_ids(llm.generate(short, greedy(4), use_tqdm=False)) == [solo(short, greedy(4))]
                shorts.append(len(llm._inbox))

        thread = threading.Thread(target=ask)
        thread.start()
        for _ in stream:
            pass
        thread.join(60)
        assert shorts[0] == 1, "the long one was still open when the first short one was answered"


# -- order and numbers -------------------------------------------------------------------------------------------------


def test_lower_priority_numbers_run_first() -> None:
    prompts = some_prompts([4] * 4)
    with engine(max_num_seqs=1) as llm:
        order = [n for n, output in llm.stream(prompts, greedy(1), priority=[2, 0, 1, 0]) if output.finished]
        assert order == [1, 3, 2, 0]


def test_counters_only_grow_and_add_up() -> None:
    prompts = some_prompts([9, 4, 13])
    with engine() as llm:
        before = (0, 0, 0, 0)
        for turn in range(3):
            outputs = llm.generate(prompts, greedy(6), use_tqdm=False)
            stats = llm.engine.stats
            now = (stats.steps, stats.computed_tokens, stats.output_tokens, stats.finished)
            assert all(a < b for a, b in zip(before, now, strict=True))
            cached = sum(o.num_cached_tokens for o in outputs)
            assert now[1] - before[1] == sum(map(len, prompts)) - cached + 3 * 5, "the last token is never computed"
            assert (now[2], now[3]) == ((turn + 1) * 18, (turn + 1) * 3)
            before = now


@pytest.mark.parametrize("show", [True, False])
def test_progress_and_log_lines_never_reach_stdout(llm: LLM, capfd: pytest.CaptureFixture[str], show: bool) -> None:
    llm.generate(["a", "b"], greedy(3), use_tqdm=show)
    with LLM(folder(), **SETTINGS):
        pass
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "Generating" not in captured.err, "stderr is no terminal here"


def test_a_bar_is_shown_to_a_terminal_on_stderr(
    llm: LLM, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes stderr for a terminal
    monkeypatch.setenv("TERM", "xterm")
    llm.generate(["a", "b"], greedy(3), use_tqdm=True)
    captured = capfd.readouterr()
    assert captured.out == "" and "Generating" in captured.err
    llm.generate(["a", "b"], greedy(3), use_tqdm=False)
    assert "Generating" not in capfd.readouterr().err


def test_the_context_manager_closes() -> None:
    with LLM(folder(), **SETTINGS) as llm:
        pass
    with pytest.raises(EngineDead, match="it was closed"):
        llm.generate("x", greedy(1), use_tqdm=False)
