"""`pagedkv chat`: what was said stays in the cache, commands, interrupts, a full context; by hand and from a pipe."""

from __future__ import annotations

import itertools
import json
import logging
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pagedkv import LLM
from pagedkv.cli import main as cli
from pagedkv.cli.chat import Keyboard, Session
from pagedkv.cli.conversation import Answer, Conversation
from pagedkv.errors import ConfigError, EngineDead, RequestInvalid, RequestTooLong
from tests.helpers.engine_rig import SETTINGS, drained, fail_at, folder, greedy, transformers_greedy

ONE_THREAD = ("--backend", "cpu", "--backend-option", "threads=1", "--dtype", "float32", "--block-size", "4")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(folder(), **SETTINGS) as made:
        yield made


@pytest.fixture
def conversation(llm: LLM) -> Iterator[Conversation]:
    yield Conversation(llm=llm, params=greedy(8))
    drained(llm)


@pytest.fixture
def session(conversation: Conversation) -> Session:
    return Session(conversation, stats=False, as_json=False)


def saying(monkeypatch: pytest.MonkeyPatch, llm: LLM, text: str) -> None:
    """From now on the model says the bytes of `text`, whatever it is asked."""
    runner, answer = llm.engine.parts.runner, text.encode()
    run = runner.run

    def forced(step: Any) -> Any:
        logits = run(step).clone()
        for at, index in enumerate(step.output_index.tolist()):
            logits[at, answer[index % len(answer)]] = 1e9
        return logits

    monkeypatch.setattr(runner, "run", forced)


def transformers_answer(messages: list[dict[str, str]], count: int) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder())
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, add_generation_prompt=True)
    return transformers_greedy(ids, count)


# -- the conversation --------------------------------------------------------------------------------------------------


def test_each_turn_is_answered_with_all_that_was_said_before(conversation: Conversation) -> None:
    conversation.system = "Be brief."
    decode = conversation.llm.get_tokenizer().decode  # type: ignore[union-attr]
    for text in ("Hello", "kůň?", "And now"):
        before = conversation.messages(text)
        said = "".join(conversation.ask(text))
        assert said == decode(transformers_answer(before, 8))
        assert conversation.messages() == [*before, {"role": "assistant", "content": said}]


def test_what_was_said_before_comes_from_the_cache(conversation: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    saying(monkeypatch, conversation.llm, "a fresh answer")
    conversation.params = greedy(14)
    known, cached = 0, []
    for number in range(4):
        list(conversation.ask(f"message {number}"))
        answer = conversation.last
        assert answer is not None and answer.text == "a fresh answer"
        # full blocks of the last prompt and its answer, whose last token was never computed
        assert answer.cached_tokens == known // 4 * 4
        known = answer.prompt_tokens + answer.output_tokens - 1
        cached.append(answer.cached_tokens)
    assert cached[0] == 0 and all(a < b for a, b in itertools.pairwise(cached))


def test_a_full_context_is_said_with_numbers_and_what_to_do(llm: LLM) -> None:
    conversation = Conversation(llm=llm, params=greedy(16))
    for text in ("first " * 6, "second " * 6, "third " * 6):
        list(conversation.ask(text))
    with pytest.raises(RequestTooLong, match=r"has \d+ tokens; model and cache hold 256.* /drop .* /reset") as caught:
        list(conversation.ask("x" * 100))
    assert caught.value.available == 256 < caught.value.needed
    assert len(conversation.turns) == 3, "nothing was dropped in silence"
    assert conversation.drop(1) == 1 and conversation.turns[0][0]["content"] == "second " * 6
    assert conversation.drop(9) == 2
    list(conversation.ask("x" * 100))
    drained(llm)


def test_an_answer_gets_the_room_that_is_left_and_says_so(
    conversation: Conversation, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedkv.cli.conversation._log.propagate", True)
    conversation.params = greedy(200)
    with caplog.at_level("WARNING", "pagedkv.cli"):
        caplog.handler.setLevel("WARNING")
        logging.getLogger("pagedkv.cli").addHandler(caplog.handler)
        try:
            list(conversation.ask("x" * 100))
        finally:
            logging.getLogger("pagedkv.cli").removeHandler(caplog.handler)
    answer = conversation.last
    assert answer is not None
    assert answer.output_tokens == 256 - answer.prompt_tokens
    assert f"only {answer.output_tokens} tokens are left for this answer, not 200" in caplog.text


def test_speed_is_that_of_the_tokens_after_the_first() -> None:
    assert Answer(output_tokens=11, seconds=3.0, first=1.0).speed == 5.0
    assert Answer(output_tokens=1, seconds=3.0, first=1.0).speed is None
    assert Answer().line() == "0 tokens; conversation before it: 0 tokens, 0 of them from the cache"


# -- by hand -----------------------------------------------------------------------------------------------------------


def typed(*lines: str | type[BaseException]) -> Callable[[], str | None]:
    left = iter(lines)

    def read() -> str | None:
        line = next(left, None)
        if isinstance(line, type):
            raise line
        return line

    return read


def test_commands(
    session: Session, conversation: Conversation, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def told(line: str) -> str:
        capsys.readouterr()
        assert session.take(line)
        return capsys.readouterr().err

    assert "/reset" in told("/help") and "/save FILE" in told("/help")
    assert "there is no system message" in told("/system")
    assert "there is no answer yet" in told("/stats")
    told("/system Be brief.")
    assert told("/system") == "Be brief.\n"
    assert session.take("Hello")
    first = capsys.readouterr().out
    assert conversation.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first[:-1]},
    ]
    assert "8 tokens" in told("/stats") and "turns kept: 1" in told("/stats")
    assert session.take("/retry")
    assert capsys.readouterr().out == first and len(conversation.turns) == 1, "the same answer in place of the first"
    file = tmp_path / "history.jsonl"
    assert "3 messages written" in told(f"/save {file}")
    assert [json.loads(line) for line in file.read_text("utf-8").splitlines()] == conversation.messages()
    with pytest.raises(ConfigError, match="is there already and is left as it is"):
        session.take(f"/save {file}")
    with pytest.raises(ConfigError, match="cannot be written"):
        session.take(f"/save {tmp_path}/no/such/folder")
    assert "1 of the oldest turns forgotten, 0 left" in told("/drop 3")
    assert session.take("//slash") and conversation.turns[0][0]["content"] == "/slash"
    assert "1 turns forgotten" in told("/reset") and conversation.messages() == [
        {"role": "system", "content": "Be brief."}
    ]
    assert session.take("  ") and not session.take("/exit") and not session.take("/quit")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/", "there is no command /;"),
        ("/foo bar", "there is no command /foo; /help lists them"),
        ("/retry", "no message to send again"),
        ("/drop x", "give a number of turns"),
        ("/drop 0", "give a number of turns"),
        ("/drop -1", "give a number of turns"),
    ],
)
def test_bad_commands_are_named(session: Session, line: str, message: str) -> None:
    with pytest.raises(RequestInvalid, match=message):
        session.take(line)


def test_an_error_is_a_line_and_the_conversation_goes_on(
    session: Session, conversation: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    session.type(typed("/foo", "x" * 300, "\ud800", "/save", "Hello", "/exit", "never"))
    captured = capsys.readouterr()
    assert captured.err.count("error: ") == 4 and "model and cache hold 256" in captured.err
    assert [turn[0]["content"] for turn in conversation.turns] == ["Hello"]


def test_ctrl_c_stops_the_answer_and_keeps_what_came(
    session: Session, conversation: Conversation, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saying(monkeypatch, conversation.llm, "abcdefgh")
    layers = 3
    failing = fail_at(conversation.llm, 4 * layers + 1, KeyboardInterrupt)  # after the prompt's step and three more
    try:
        session.type(typed("Hello", "again", "/exit"))
    finally:
        conversation.llm.engine.parts.runner.backend = failing._backend
    captured = capsys.readouterr()
    assert captured.out == "abcd\nabcdefgh\n"
    assert "what there is of the answer is kept" in captured.err
    assert [turn[1]["content"] for turn in conversation.turns] == ["abcd", "abcdefgh"]
    assert conversation.messages()[1] == {"role": "assistant", "content": "abcd"}


def test_a_second_ctrl_c_at_the_prompt_leaves_and_one_in_between_does_not(session: Session) -> None:
    read = typed(KeyboardInterrupt, "/help", KeyboardInterrupt, KeyboardInterrupt, "not reached")
    session.type(read)
    assert read() == "not reached"


def test_a_message_of_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one \\", "two\\", "three", '"""', "a", "", 'b"""', '"""c"""', "last"])
    prompts: list[str] = []

    def answered(prompt: str = "") -> str:
        prompts.append(prompt)
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", answered)
    keyboard = Keyboard()
    assert [keyboard.read() for _ in range(5)] == ["one \ntwo\nthree", "a\n\nb", "c", "last", None]


def test_what_could_move_the_cursor_is_shown_as_a_sign(
    session: Session, conversation: Conversation, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    saying(monkeypatch, conversation.llm, "a\x1b[2J\n\x9b")
    session._shown_raw = False
    session.take("Hello")
    assert capsys.readouterr().out == "a␛[2J\n\ufffd\n"


def test_unusable_logits_forget_the_turn(
    session: Session, conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = conversation.llm.engine.parts.runner
    run = runner.run
    monkeypatch.setattr(runner, "run", lambda step: run(step) * float("nan"))
    with pytest.raises(RequestInvalid, match="no usable logits"):
        session.take("Hello")
    assert conversation.turns == []


def test_a_dead_engine_ends_the_conversation() -> None:
    with LLM(folder(), **SETTINGS) as llm:
        session = Session(Conversation(llm=llm, params=greedy(4)), stats=False, as_json=False)
        fail_at(llm, 1, lambda: RuntimeError("it burns"))
        with pytest.raises(EngineDead, match="it burns"):
            session.type(typed("Hello", "/exit"))


# -- the command -------------------------------------------------------------------------------------------------------


def run(*arguments: str, stdin: str | bytes) -> Any:
    at = () if arguments and arguments[0] == "at" else (str(folder()),)
    rest = arguments[1:] if not at else arguments
    return CliRunner().invoke(cli.pagedkv, ["chat", *at, *rest, *ONE_THREAD, "-q"], input=stdin)


def test_from_a_pipe_each_line_is_a_message() -> None:
    result = run("--json", "--system", "Be brief.", "--max-tokens", "8", "--ignore-eos", stdin="Hello\n\nAnd now\n")
    assert result.exit_code == 0, result.output
    first, second = map(json.loads, result.stdout.splitlines())
    system = {"role": "system", "content": "Be brief."}
    hello = {"role": "user", "content": "Hello"}
    assert first["num_output_tokens"] == 8 and first["finish_reason"] == "length"
    assert first["num_prompt_tokens"] == len("[system]Be brief.\n[user]Hello\n[assistant]")
    assert second["num_cached_tokens"] >= first["num_prompt_tokens"] // 4 * 4 > 0
    assert {"role": first["role"], "content": first["content"]} == {
        "role": "assistant",
        "content": _decoded(transformers_answer([system, hello], 8)),
    }
    plain = run("--stats", "--system", "Be brief.", "--max-tokens", "8", "--ignore-eos", stdin="Hello\nAnd now\n")
    assert plain.stdout == f"{first['content']}\n{second['content']}\n"
    assert plain.stderr.count("from the cache") == 2 and plain.stderr.count("cut off after 8 tokens") == 2


def _decoded(ids: list[int]) -> str:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder()).decode(ids, skip_special_tokens=True)


def test_a_stop_text_ends_the_answer() -> None:
    arguments = ("--json", "--max-tokens", "12", "--ignore-eos")
    (whole,) = map(json.loads, run(*arguments, stdin="Hello\n").stdout.splitlines())
    stop = next(sign for sign in whole["content"][1:] if sign.isascii())
    (cut,) = map(json.loads, run(*arguments, "--stop", stop, stdin="Hello\n").stdout.splitlines())
    assert (cut["content"], cut["finish_reason"]) == (whole["content"].partition(stop)[0], "stop")


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        ("/foo\nHello\n", "standard input:1: there is no command /foo"),
        ("Hello\n" + "x" * 300 + "\n", "standard input:2: with this message the conversation has"),
        (b"\xff\xfe\n", "standard input:1: not UTF-8"),
    ],
)
def test_in_a_pipe_the_first_error_is_the_end(stdin: str | bytes, message: str) -> None:
    result = run("--max-tokens", "2", stdin=stdin)
    assert result.exit_code == 2 and message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("at",), "no model is given"),
        (("--max-tokens", "0"), "max_tokens"),
        (("--temperature", "-1"), "temperature must be"),
        (("--min-tokens", "9", "--max-tokens", "3"), "min_tokens (9) must not exceed max_tokens (3)"),
        (("--max-tokens", "many"), "neither a number of tokens nor none"),
    ],
)
def test_bad_options_are_named_before_the_model_is_loaded(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedkv.llm.build", lambda *_: pytest.fail("the model was loaded"))
    result = run(*arguments, stdin="Hello\n")
    assert result.exit_code == 2 and message in result.stderr


def test_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "plain"
    shutil.copytree(folder(), copy)
    config = json.loads((copy / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    result = run("at", str(copy), stdin="Hello\n")
    assert result.exit_code == 1 and "has no chat template; use a chat model" in result.stderr


def test_in_a_terminal_with_ctrl_c_resize_and_ctrl_d() -> None:
    """The real thing: a pseudo-terminal, an endless answer that Ctrl-C stops, then one more message and Ctrl-D."""
    here, there = pty.openpty()
    command = [sys.executable, "-m", "pagedkv.cli.main", "chat", str(folder()), "--max-tokens", "none", "--ignore-eos"]
    environment = {**os.environ, "TERM": "dumb", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [*command, *ONE_THREAD, "-q"], stdin=there, stdout=there, stderr=there, env=environment, start_new_session=True
    ) as process:
        os.close(there)
        screen = Screen(here, process)
        screen.until("Ctrl-D leaves", "> ")
        os.write(here, b"/stats\n")
        screen.until("there is no answer yet", "> ")
        os.kill(process.pid, signal.SIGWINCH)
        os.write(here, b"Hello\n")
        screen.until("Hello", "\n")
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        screen.until("Ctrl-C again, Ctrl-D or /exit leaves", "> ")
        os.write(here, b"/stats\n")
        screen.until("turns kept: ", "> ")
        os.write(here, b"\x04")
        assert process.wait(30) == 0
    os.close(here)


class Screen:
    """What a terminal shows, read until texts have come."""

    def __init__(self, descriptor: int, process: subprocess.Popen[bytes]) -> None:
        self._descriptor, self._process = descriptor, process
        self._text, self._seen = "", 0

    def until(self, *texts: str) -> None:
        for text in texts:
            deadline = time.monotonic() + 90
            while (at := self._text.find(text, self._seen)) < 0:
                ready, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    self._process.kill()
                    pytest.fail(f"{text!r} did not come; the terminal shows {self._text!r}")
                self._text += os.read(self._descriptor, 65536).decode(errors="replace")
            self._seen = at + len(text)
