"""Log lines go to standard error; results never do. One handler, put there by the command line or by `LLM`."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from pagedkv.api.errors import ConfigError

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


if TYPE_CHECKING:
    _StreamHandler = logging.StreamHandler[Any]
else:
    _StreamHandler = logging.StreamHandler  # Python 3.10 cannot subscript it


class _Handler(_StreamHandler):
    """Writes to what standard error is at the time, so that redirecting it later (a progress bar does) works."""

    def __init__(self, logger: logging.Logger, formatter: logging.Formatter) -> None:
        logging.Handler.__init__(self)
        self.setFormatter(formatter)
        self.before = (logger.level, logger.propagate)

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, value: Any) -> None:
        raise AttributeError("this handler follows sys.stderr")


class _CommandFormatter(logging.Formatter):
    """The message alone; anything but plain information says how bad it is."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno == logging.INFO else f"{record.levelname.lower()}: {text}"


def setup_logging(level: str | None = None) -> None:
    """Show pagedkv's log lines at `level`, or PAGEDKV_LOG_LEVEL, or INFO, with their level and origin.

    A program that configured logging itself (a handler on the root or on "pagedkv") keeps its own configuration, unless
    `level` is given. Raises `ConfigError`.
    """
    logger, wanted = logging.getLogger("pagedkv"), _wanted(level)
    if level is None and (logger.handlers or logging.getLogger().handlers):
        return
    if not logger.handlers:
        _install(logger, logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logger.setLevel(wanted)


def start_command_logging(level: str | None = None) -> None:
    """What `setup_logging` does, as a command shows it: bare messages, whatever the program around it has set up.

    A second call changes the level only. Raises `ConfigError`.
    """
    logger, wanted = logging.getLogger("pagedkv"), _wanted(level)
    if _command_handler(logger) is None:
        _install(logger, _CommandFormatter("%(message)s"))
    logger.setLevel(wanted)


def stop_command_logging() -> None:
    """Leave logging as it was, for a command that ran inside another program."""
    logger = logging.getLogger("pagedkv")
    handler = _command_handler(logger)
    if handler is not None:
        logger.removeHandler(handler)
        level, logger.propagate = handler.before
        logger.setLevel(level)


def _wanted(level: str | None) -> str:
    name, text = ("level", level) if level else ("PAGEDKV_LOG_LEVEL", os.environ.get("PAGEDKV_LOG_LEVEL", ""))
    wanted = text.strip().upper() or "INFO"
    if wanted not in LEVELS:
        raise ConfigError(f"{name}={wanted!r} is no log level; use one of {', '.join(LEVELS)}")
    return wanted


def _install(logger: logging.Logger, formatter: logging.Formatter) -> None:
    logger.addHandler(_Handler(logger, formatter))
    logger.propagate = False  # else a handler on the root would show every line twice


def _command_handler(logger: logging.Logger) -> _Handler | None:
    return next(
        (h for h in logger.handlers if isinstance(h, _Handler) and isinstance(h.formatter, _CommandFormatter)), None
    )
