"""What every command shares: flags with - or _, MODEL or --model, logging on standard error, errors as one message."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from pagedkv.api.errors import BackendNotFound, ConfigError, PagedKVError, RequestError
from pagedkv.logs import start_command_logging

USAGE_ERRORS = (BackendNotFound, ConfigError, RequestError)
"""Errors that another command line would avoid: exit code 2; every other one of ours is 1."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells count it: 128 + SIGINT."""

CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 110,
}

_log = logging.getLogger("pagedkv.cli")


class Failure(click.ClickException):
    """One of our errors on its way to standard error, as `error: ...`, never cut."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message."""
        click.echo(f"error: {self.message}", file=file, err=file is None)


class UsageFailure(Failure):
    """A failure that another command line would avoid."""

    exit_code = 2


@contextmanager
def reported() -> Iterator[None]:
    """Turn our errors into a message and an exit code, with --debug after their traceback; Ctrl-C ends in one word."""
    try:
        yield
    except KeyboardInterrupt as error:
        click.echo("interrupted", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from error
    except PagedKVError as error:
        _log.debug("traceback of the error below", exc_info=True)
        kind = UsageFailure if isinstance(error, USAGE_ERRORS) else Failure
        raise kind(str(error) or type(error).__name__) from error


def _flag(level: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    def set_level(context: click.Context, parameter: click.Parameter, given: bool) -> None:
        if given:
            start_command_logging(level)

    return set_level


def logging_options() -> list[click.Option]:
    """-q/--quiet, -v/--verbose and --debug; every command gets them."""
    described = (
        ("--quiet", "-q", "WARNING", "Show warnings and errors only."),
        ("--verbose", "-v", "DEBUG", "Show every log line."),
        ("--debug", None, "DEBUG", "Show every log line, and the traceback of an error."),
    )
    return [
        click.Option(
            [name, *([short] if short else [])], is_flag=True, expose_value=False, callback=_flag(level), help=help_text
        )
        for name, short, level, help_text in described
    ]


def model_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command its model as `MODEL` or as `--model MODEL`; it arrives as the keyword `model`."""

    @click.argument("model_argument", metavar="MODEL", required=False)
    @click.option("--model", "model_option", metavar="MODEL", help="The same as MODEL, in the name other tools use.")
    @functools.wraps(command)
    def with_model(
        *args: Any, model_argument: str | None = None, model_option: str | None = None, **kwargs: Any
    ) -> Any:
        return command(*args, model=_one_model(model_argument, model_option), **kwargs)

    return with_model


def _one_model(argument: str | None, option: str | None) -> str:
    if argument and option and argument != option:
        raise click.UsageError(f"two models are given, {argument!r} and --model {option!r}; give one of them")
    model = argument or option
    if not model:
        raise click.UsageError("no model is given; name a folder, a .gguf file, a hub id, or demo")
    return model
