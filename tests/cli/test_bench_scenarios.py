"""`pagedkv bench --scenario`: the same work on three engines, whose figures agree with what can be counted by hand."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter

import pytest
from click.testing import CliRunner

from pagedkv.cli import main as cli
from pagedkv.cli import scenario_report
from pagedkv.cli.scenario_bench import HOST_TIER, NO_SWAP, SWAP, differing, measure, plan
from pagedkv.cli.scenario_options import SIZES
from pagedkv.cli.scenarios import Ask, Work, work
from pagedkv.models.native import NativeDecoder
from tests.helpers.engine_rig import folder, transformers_greedy
from tests.helpers.tiny_models import VOCAB_SIZE

SMALL = {"context_len": 40, "input_len": 6, "output_len": 10}
FEW = {"chat": {"users": 5, "turns": 3}, "documents": {"documents": 4, "questions": 3}, "agents": {"branches": 2}}
CPU = {"backend": "cpu", "backend_options": {"threads": 1}, "block_size": 4, "dtype": "float32"}
ONE_THREAD = ("--backend", "cpu", "--backend-option", "threads=1", "--dtype", "float32", "--block-size", "4")
LENGTHS = ("--context-len", "40", "--input-len", "6", "--output-len", "10")


def sized(scenario: str, **sizes: int) -> Work:
    return work(scenario, {**SIZES[scenario], **SMALL, **sizes}, 3)


@functools.cache
def runs(scenario: str):
    made = plan(str(folder()), sized(scenario, **FEW[scenario]), 0.5, CPU)
    return made, {kind: measure(made.work, kind, made.build(kind)) for kind in made.kinds}


@pytest.fixture
def run(monkeypatch):
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)
    monkeypatch.delenv("PAGEDKV_LOG_LEVEL", raising=False)
    return lambda *arguments: CliRunner().invoke(cli.pagedkv, ["bench", str(folder()), *arguments])


# -- the work ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SIZES)
def test_work_depends_on_sizes_and_seed_alone(scenario):
    sizes = {**SIZES[scenario], **SMALL}
    made, again, other = work(scenario, sizes, 5), work(scenario, sizes, 5), work(scenario, sizes, 6)
    assert made == again and made.texts(256) == again.texts(256)
    assert made.asks != other.asks, "another order"
    assert made.texts(256) != other.texts(256)
    contexts, texts = made.texts(50)
    assert [len(context) for context in contexts] == list(made.contexts)
    assert [len(text) for text in texts] == [ask.length for ask in made.asks]
    assert {token for text in (*contexts, *texts) for token in text} <= set(range(50))


def test_users_of_a_chat_take_turns_and_each_turn_follows_the_users_last():
    made = sized("chat", users=5, turns=3)
    assert made.contexts == (40,) and len(made.asks) == 15
    assert [ask.after is None for ask in made.asks] == [True] * 5 + [False] * 10
    followed = [ask.after for ask in made.asks[5:]]
    assert sorted(followed[:5]) == list(range(5)) and sorted(followed[5:]) == list(range(5, 10))
    # A turn adds 6 and 10; the third prompt has two of these before its own 6.
    assert made.prompt_lengths == [46] * 5 + [62] * 5 + [78] * 5
    assert (made.longest, made.tokens) == (88, 40 + 15 * 16)


def test_documents_are_asked_about_equally_often_in_mixed_order():
    made = sized("documents", documents=4, questions=3)
    order = [ask.context for ask in made.asks]
    assert Counter(order) == {0: 3, 1: 3, 2: 3, 3: 3} and order != sorted(order)
    assert (made.contexts, made.tokens, made.longest) == ((40,) * 4, 4 * 40 + 12 * 16, 56)


def test_agents_branch_again_and_some_go_back():
    made = sized("agents", branches=2, depth=2)
    asks = made.asks
    assert asks[0] == Ask(length=6, samples=2)
    assert {(ask.after, ask.branch, ask.samples) for ask in asks[1:3]} == {(0, 0, 2), (0, 1, 2)}
    assert asks[3].after == 0 and asks[3].samples == 1, "half of two go back"
    assert {(ask.after, ask.branch) for ask in asks[4:8]} == {(1, 0), (1, 1), (2, 0), (2, 1)}
    assert len(asks) == 10 and all(ask.after in (1, 2) for ask in asks[8:])
    assert (made.samples, made.tokens) == (2, 40 + 10 * 6 + (2 + 2 * 2 + 1 + 4 + 2) * 10)


# -- the engines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SIZES)
def test_every_prompt_token_is_found_or_computed(scenario):
    made, measured = runs(scenario)
    assert tuple(measured) == made.kinds == (NO_SWAP, SWAP, HOST_TIER)
    for run in measured.values():
        counts = run.counts
        found = counts.device_cached_tokens + counts.host_cached_tokens
        assert counts.prompt_tokens == sum(made.work.prompt_lengths) == found + counts.computed_prompt_tokens
        assert counts.device_cached_tokens > 0
        assert len(run.first) == len(made.work.asks) and 0 < min(run.first) <= max(run.first) < run.seconds


@pytest.mark.parametrize("scenario", ["chat", "documents"])
def test_the_engines_count_of_computed_tokens_agrees(scenario):
    made, measured = runs(scenario)
    # The last token of an answer is not computed, and the first comes with the prompt's.
    answers = len(made.work.asks) * (made.work.output_len - 1)
    for run in measured.values():
        counts = run.counts
        assert counts.computed_tokens == counts.computed_prompt_tokens + counts.recomputed_tokens + answers


def test_blocks_are_copied_only_where_there_is_somewhere_to_copy_them():
    for scenario in SIZES:
        none, swap, tier = runs(scenario)[1].values()
        assert (none.counts.blocks_out, none.counts.blocks_in, none.counts.preemptions_by_swap) == (0, 0, 0)
        assert none.counts.host_cached_tokens == swap.counts.host_cached_tokens == 0
        # 3 layers, keys and values, 2 heads of 12, 4 bytes each, 4 tokens a block; the pool may pad it.
        assert tier.counts.bytes_out >= tier.counts.blocks_out * 3 * 2 * 2 * 12 * 4 * 4 > 0


def test_a_host_tier_finds_what_the_device_has_lost():
    none, _, tier = runs("documents")[1].values()
    assert tier.counts.host_cached_tokens > 0
    assert tier.counts.computed_prompt_tokens < none.counts.computed_prompt_tokens
    assert tier.counts.blocks_in * 4 >= tier.counts.host_cached_tokens


def test_with_too_small_a_cache_some_are_preempted_and_swap_computes_nothing_again():
    # 3 * 20 + 6 * 46 tokens, of which 33 blocks hold 0.4; four that run take 7 each at first, and 17 in the end.
    tight = sized("documents", documents=3, questions=2, context_len=20, output_len=40)
    made = plan(str(folder()), tight, 0.4, {**CPU, "preemption_mode": "swap"})
    none, swap = (measure(tight, kind, made.build(kind)) for kind in (NO_SWAP, SWAP))
    assert none.counts.preemptions_by_recompute > 0 and none.counts.recomputed_tokens > 0
    assert swap.counts.preemptions_by_swap > 0 and swap.counts.blocks_in > 0
    assert differing([none, swap]) == 0
    assert swap.counts.preemptions_by_recompute == swap.counts.recomputed_tokens == 0


@pytest.mark.parametrize("scenario", SIZES)
def test_answers_are_the_same_with_all_settings(scenario):
    made, measured = runs(scenario)
    assert differing(list(measured.values())) == 0
    answers = measured[NO_SWAP].answers
    assert [len(each) for each in answers] == [ask.samples for ask in made.work.asks]
    assert all(len(ids) == made.work.output_len for each in answers for ids in each)


def test_the_answers_are_the_models_own():
    made, measured = runs("chat")
    contexts, texts = made.work.texts(VOCAB_SIZE)
    place = next(at for at, ask in enumerate(made.work.asks) if ask.after is not None)
    before = made.work.asks[place].after
    first = contexts[0] + texts[before]
    answers = measured[HOST_TIER].answers
    assert answers[before] == [transformers_greedy(first, 10)]
    assert answers[place] == [transformers_greedy(first + answers[before][0] + texts[place], 10)]


def test_other_answers_are_counted_and_said():
    made, measured = runs("documents")
    none, swap, tier = measured.values()
    other = dataclasses.replace(swap, answers=[[[0] * 10], *swap.answers[1:]])
    assert differing([none, other, tier]) == 1
    said = scenario_report.notes(scenario_report.rows(made.work, [none, other, tier]))
    assert said[0] == "answers: 1 of 12 requests got other token ids with another setting"
    loose = dataclasses.replace(none.choice, features=none.choice.features - {"batch_invariant"})
    rows = scenario_report.rows(made.work, [dataclasses.replace(none, choice=loose), other])
    assert "results depend on the batch here (--batch-invariant keeps them equal)" in scenario_report.notes(rows)[0]


def test_a_backend_without_host_memory_runs_the_first_engine_only(monkeypatch):
    from pagedkv import plugins

    offer = plugins.offer
    monkeypatch.setattr(
        plugins, "offer", lambda selected: dataclasses.replace(offer(selected), placements=frozenset({"device"}))
    )
    assert plan(str(folder()), sized("chat"), 0.5, CPU).kinds == (NO_SWAP,)
    made, measured = runs("chat")
    (note,) = scenario_report.notes(scenario_report.rows(made.work, [measured[NO_SWAP]]))
    assert note == "host memory: backend cpu has none beside its own, so there is no swap to compare with"


# -- the command -------------------------------------------------------------------------------------------------------


def test_json_rows_have_sizes_settings_and_figures(run, tmp_path):
    path = tmp_path / "figures.jsonl"
    sizes = ("--scenario", "documents", *LENGTHS, "--documents", "4", "--questions", "3", "--seed", "3")
    result = run(*sizes, "--json", "--output", str(path), *ONE_THREAD)
    assert result.exit_code == 0, result.output
    assert path.read_text() == result.stdout
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["setting"] for row in rows] == ["no swap", "swap", "swap + host tier"]
    made, measured = runs("documents")
    for row, known in zip(rows, measured.values(), strict=True):
        assert (row["scenario"], row["seed"], row["differing_answers"]) == ("documents", 3, 0)
        assert (row["work"]["requests"], row["work"]["tokens"]) == (12, made.work.tokens)
        assert row["output_tokens"] == 12 * 10
        assert row["tokens_per_second"] == pytest.approx(row["output_tokens"] / row["seconds"])
        assert 0 < row["time_to_first_token"]["median"] <= row["time_to_first_token"]["max"]
        # 4 * 40 + 12 * 16 tokens, of which a half, in blocks of 4.
        assert (row["cache"]["blocks"], row["cache"]["block_size"], row["cache"]["share"]) == (44, 4, 0.5)
        assert row["prompt_tokens"] == known.counts.prompt_tokens == 12 * 46
        assert row["machine"]["prefix_caching"] and row["machine"]["backend"] == "cpu"
    assert [row["cache"]["host_is_shared"] for row in rows] == [False, True, True]


def test_the_table_has_a_line_for_each_engine_and_says_what_it_stands_on(run):
    result = run("--scenario", "agents", *LENGTHS, "--branches", "2", "--num-blocks", "31", "-q", *ONE_THREAD)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("agents: one task, 2 branches each time") and "10 requests, 8 at once" in lines[0]
    assert lines[1].startswith("the cache holds 30 blocks of 4, ")
    assert [line.split("  ")[0] for line in lines[4:7]] == ["no swap", "swap", "swap + host tier"]
    assert lines[8:] == [
        "answers: the same token ids with all 3 settings",
        "host memory: backend cpu keeps its cache in the same RAM; copies stay within it",
    ]


def test_without_prefix_caching_there_is_no_host_tier(run):
    result = run(
        *("--scenario", "documents", *LENGTHS, "--documents", "2", "--questions", "2", "--swap-blocks", "9"),
        *("--no-enable-prefix-caching", "-q", *ONE_THREAD),
    )
    assert result.exit_code == 0, result.output
    assert "host memory 9 blocks" in result.stdout
    assert "swap + host tier" not in result.stdout
    assert "host tier: left out, as prefix caching is off" in result.stdout


def test_on_loopback_the_answers_are_the_same_too(run):
    small = ("--context-len", "16", "--input-len", "5", "--output-len", "6", "--users", "3", "--turns", "2")
    result = run("--scenario", "chat", *small, "--backend", "loopback", "--block-size", "4", "--json", "-q")
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["differing_answers"] for row in rows] == [0, 0, 0]
    assert rows[1]["cache"]["host_is_shared"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--scenario", "chats"), "'chats' is not one of 'chat', 'documents', 'agents'"),
        (("--users", "3", "--cache-share", "1"), "--users, --cache-share need --scenario"),
        (("--scenario", "chat", "--batch-sizes", "1"), "--batch-sizes do not go with --scenario chat"),
        (("--scenario", "chat", "--repeats", "3", "--floor"), "--repeats, --floor do not go with --scenario chat"),
        (("--scenario", "chat", "--documents", "3"), "--documents are not of chat; it has --users, --turns,"),
        (("--scenario", "chat", "--users", "0"), "--users"),
        (("--scenario", "chat", "--cache-share", "0"), "--cache-share"),
        (("--scenario", "chat", "--cache-share", "0.5", "--num-blocks", "50"), "--num-blocks both size the cache"),
        (("--scenario", "chat", "--no-enable-host-caching"), "a scenario runs both ways"),
        (("--scenario", "chat", "--swap-space", "0"), "without host memory anyway"),
        (("--scenario", "chat", "--swap-blocks", "0"), "without host memory anyway"),
        (("--scenario", "chat", *LENGTHS, "--max-model-len", "60"), "more than --max-model-len 60"),
        (("--scenario", "chat", "--context-len", "300"), "the longest request of --scenario chat has 684 tokens"),
        (("--scenario", "agents", "--output", "/no/such/folder/file"), "there is no folder /no/such/folder"),
    ],
)
def test_options_are_checked_first(run, monkeypatch, arguments, message):
    def load(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr(NativeDecoder, "load", load)
    result = run(*arguments, *ONE_THREAD)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_a_share_that_cannot_hold_the_longest_request_is_refused_with_one_that_can(run):
    arguments = ("--scenario", "chat", *LENGTHS, "--users", "2", "--turns", "2", "-q", *ONE_THREAD)
    refused = run(*arguments, "--cache-share", "0.1")
    # 40 + 2 * 2 * 16 = 104 tokens; the longest has 40 + 2 * 16 = 72, of which 71 are stored in 18 blocks.
    assert refused.exit_code == 2
    assert "are 3 blocks of 4, but the longest request alone, 72 tokens, needs 18" in refused.stderr
    share = refused.stderr.split("--cache-share ")[-1].split()[0]
    assert 18 * 4 <= float(share) * 104 < 18 * 4 + 2
    assert run(*arguments, "--cache-share", share).exit_code == 0


def test_host_memory_that_is_left_open_holds_all_of_the_work():
    made = sized("chat")
    sizes = [
        plan(str(folder()), made, 0.5, {**CPU, **given}).build(SWAP).memory.host.blocks
        for given in ({}, {"swap_space": "auto"}, {"swap_blocks": 7})
    ]
    assert sizes[0] == sizes[1] >= made.tokens // 4 and sizes[2] == 7
