"""`pagedkv chat`: a conversation in the terminal, or of lines from a pipe."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagedkv.api.errors import ConfigError, ModelError, RequestError, RequestInvalid
from pagedkv.cli.common import model_argument
from pagedkv.cli.model_options import engine_options, engine_settings
from pagedkv.cli.prompt_files import STDIN, lines_of, placed
from pagedkv.cli.sampling_options import sampling_options

if TYPE_CHECKING:
    from pagedkv.cli.conversation import Conversation

MAX_TOKENS = 1024
PROMPT, MORE = "> ", ". "
HELP = """\
/help          this list
/system TEXT   set the system message; without TEXT show it
/retry         send the last message again, in place of its answer
/drop [N]      forget the oldest turn, or the N oldest
/reset         forget all turns; the system message stays
/stats         tokens/s and cached tokens of the last answer
/save FILE     write the messages to a new file, one JSON object a line
/exit          leave, as Ctrl-D does
A line that ends in \\ goes on in the next one; \"\"\" begins and ends a text of several lines; // begins a message
that starts with /. Ctrl-C stops an answer and keeps what there is of it."""
_QUOTES = '"""'
# What could move the cursor or change the terminal is shown as a sign for it.
_SIGNS = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {0x7F: 0x2421}
_SIGNS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


@click.command("chat")
@model_argument
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option("--stats", is_flag=True, help="Show tokens/s and cached tokens after every answer.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object an answer.")
@sampling_options(MAX_TOKENS)
@engine_options
def chat(
    model: str, system: str | None, stats: bool, as_json: bool, sampling: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Talk with MODEL: a folder, a .gguf file, a hub id, or demo.

    What was said before stays in the cache, so that only what is new is computed. /help shows the commands. From a
    pipe, each line is a message (or a command) and the first error ends it.

    \b
    pagedkv chat demo
    pagedkv chat ./Qwen3-0.6B --system "Answer in one sentence." --temperature 0.7
    printf 'Hello\\nWhat did I say?\\n' | pagedkv chat demo --json
    """
    from pagedkv.cli.conversation import Conversation
    from pagedkv.llm import LLM
    from pagedkv.sampling.params import SamplingParams

    params = SamplingParams(**sampling)
    named = {"max_num_seqs": 1, **engine_settings(settings)}
    with LLM(model, **named) as llm:
        tokenizer = llm.engine.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise ModelError(f"{model} has no chat template; use a chat model, or pagedkv generate for plain prompts")
        conversation = Conversation(llm=llm, params=params, system=system)
        session = Session(conversation, stats=stats, as_json=as_json)
        if sys.stdin.isatty():
            size = llm.engine.scheduler.capacity()
            _say(f"{model}: room for {size} tokens. /help shows the commands, Ctrl-D leaves")
            session.type(Keyboard().read)
            return
        for where, line, _ in lines_of(STDIN):
            with placed(where):
                if not session.take(line):
                    return


class Session:
    """Takes messages and commands one after the other. Answers go to standard output, all else to standard error."""

    def __init__(self, conversation: Conversation, *, stats: bool, as_json: bool) -> None:
        self._conversation = conversation
        self._stats, self._as_json = stats, as_json
        self._asked: str | None = None
        self._shown_raw = not sys.stdout.isatty()
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: _say(HELP),
            "system": self._system,
            "retry": self._retry,
            "drop": self._drop,
            "reset": self._reset,
            "stats": self._show_stats,
            "save": self._save,
        }

    def type(self, read: Callable[[], str | None]) -> None:
        """Go on until there is nothing more to read. An error is a line on the screen; a second Ctrl-C leaves."""
        interrupted = reading = False
        while True:
            try:
                reading = True
                line = read()
                interrupted = reading = False
                if line is None or not self._take_shown(line):
                    return
            except KeyboardInterrupt:
                if interrupted:
                    return
                interrupted = True
                _say(f"{chr(10) if reading else ''}Ctrl-C again, Ctrl-D or /exit leaves")

    def _take_shown(self, line: str) -> bool:
        try:
            return self.take(line)
        except (RequestError, ConfigError, ModelError) as error:
            _say(f"error: {error}")
            return True

    def take(self, line: str) -> bool:
        """Answer one message, or do what a command says; False: it says to leave. Raises errors of ours."""
        if not line.strip():
            return True
        if not line.startswith("/") or line.startswith("//"):
            self._ask(line[1:] if line.startswith("//") else line)
            return True
        name, _, rest = line[1:].strip().partition(" ")
        if name in ("exit", "quit"):
            return False
        if name not in self._commands:
            raise RequestInvalid(
                f"there is no command /{name}; /help lists them, // begins a message that starts with /",
                field="message",
            )
        self._commands[name](rest.strip())
        return True

    # -- answers -------------------------------------------------------------------------------------------------------

    def _ask(self, text: str) -> None:
        self._asked = text
        try:
            with contextlib.closing(self._conversation.ask(text)) as pieces:
                for piece in pieces:
                    self._show(piece)
        except KeyboardInterrupt:
            self._finish()
            _say("stopped; what there is of the answer is kept")
            raise
        self._finish()

    def _show(self, piece: str) -> None:
        if not self._as_json:
            click.echo(piece if self._shown_raw else piece.translate(_SIGNS), nl=False)

    def _finish(self) -> None:
        answer = self._conversation.last
        if answer is None:
            return
        if self._as_json:
            unicode = (getattr(sys.stdout, "encoding", None) or "").lower().startswith("utf")
            click.echo(json.dumps(answer.figures(), ensure_ascii=not unicode))
        else:
            click.echo()
        if answer.finish_reason == "error":
            raise RequestInvalid("the model gave no usable logits (NaN); this turn is forgotten", field="message")
        if answer.finish_reason == "length":
            _say(f"cut off after {answer.output_tokens} tokens, the limit of this answer")
        if self._stats:
            _say(answer.line())

    # -- commands ------------------------------------------------------------------------------------------------------

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = text
            _say("the system message holds from the next message on; the conversation is computed anew then")
        else:
            _say(self._conversation.system or "there is no system message; /system TEXT sets one")

    def _retry(self, _: str) -> None:
        if self._asked is None:
            raise RequestInvalid("there is no message to send again yet", field="message")
        self._conversation.take_back(self._asked)
        self._ask(self._asked)

    def _drop(self, text: str) -> None:
        count = int(text) if text.isdecimal() else 0
        if text and count < 1:
            raise RequestInvalid(f"/drop {text}: give a number of turns, 1 or more", field="message")
        gone = self._conversation.drop(count or 1)
        _say(f"{gone} of the oldest turns forgotten, {len(self._conversation.turns)} left")

    def _reset(self, _: str) -> None:
        self._asked = None
        gone = self._conversation.drop(len(self._conversation.turns))
        _say(f"a new conversation; {gone} turns forgotten")

    def _show_stats(self, _: str) -> None:
        answer, turns = self._conversation.last, len(self._conversation.turns)
        _say("there is no answer yet" if answer is None else f"{answer.line()}; turns kept: {turns}")

    def _save(self, name: str) -> None:
        if not name:
            raise ConfigError("/save needs the name of a file")
        _say(f"{self._conversation.save(Path(name).expanduser())} messages written to {name}")


def _say(text: str) -> None:
    click.echo(text, err=True)


class Keyboard:
    """Messages as they are typed, with line editing and the lines of this run where Python has `readline`."""

    def __init__(self) -> None:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")
        self._prompts_stdout = sys.stdout.isatty()

    def read(self) -> str | None:
        """One message, which may have several lines; None at the end."""
        try:
            line = self._line(PROMPT)
            if line.lstrip().startswith(_QUOTES):
                return self._quoted(line.lstrip()[len(_QUOTES) :])
            while line.endswith("\\"):
                line = line[:-1] + "\n" + self._line(MORE)
        except EOFError:
            _say("")
            return None
        return line

    def _quoted(self, text: str) -> str:
        while not text.rstrip().endswith(_QUOTES):
            text += "\n" + self._line(MORE)
        return text.rstrip()[: -len(_QUOTES)].strip("\n")

    def _line(self, prompt: str) -> str:
        if self._prompts_stdout:
            return input(prompt)
        click.echo(prompt, nl=False, err=True)  # standard output is for answers
        return input()
