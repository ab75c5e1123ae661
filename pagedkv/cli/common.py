"""What every command shares: flags with - or _, MODEL or --model, logging on standard error, errors as one message."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import click

from pagedkv.api.errors import BackendNotFound, ConfigError, PagedKVError, RequestError

USAGE_ERRORS = (BackendNotFound, ConfigError, RequestError)
"""Errors that another command line would avoid: exit code 2; every other one of ours is 1."""

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

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
    """Turn our errors into a message and an exit code; with --debug the traceback goes before it."""
    try:
        yield
    except PagedKVError as error:
        _log.debug("traceback of the error below", exc_info=True)
        kind = UsageFailure if isinstance(error, USAGE_ERRORS) else Failure
        raise kind(str(error) or type(error).__name__) from error


class _StderrHandler(logging.StreamHandler[Any]):
    """Writes to what standard error is at the time, so that redirecting it later works."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        raise AttributeError("this handler follows sys.stderr")


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno == logging.INFO else f"{record.levelname.lower()}: {text}"


def set_up_logging(level: str | None = None) -> None:
    """Log to standard error from `level` on; None takes `PAGEDKV_LOG_LEVEL`, else INFO. Raises `ConfigError`."""
    chosen = level or os.environ.get("PAGEDKV_LOG_LEVEL", "").strip().upper() or "INFO"
    if chosen not in LEVELS:
        raise ConfigError(f"PAGEDKV_LOG_LEVEL={chosen!r} is no log level; use one of {', '.join(LEVELS)}")
    logger = logging.getLogger("pagedkv")
    _drop_handler(logger)
    handler = _StderrHandler()
    handler.setFormatter(_Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(chosen)


def tear_down_logging() -> None:
    """Leave logging as it was, for a command that ran inside another program."""
    logger = logging.getLogger("pagedkv")
    _drop_handler(logger)
    logger.setLevel(logging.NOTSET)


def _drop_handler(logger: logging.Logger) -> None:
    for handler in [h for h in logger.handlers if isinstance(h, _StderrHandler)]:
        logger.removeHandler(handler)


def _flag(level: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    def set_level(context: click.Context, parameter: click.Parameter, given: bool) -> None:
        if given:
            set_up_logging(level)

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
