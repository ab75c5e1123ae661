"""Log lines go to stderr; results never do."""

from __future__ import annotations

import logging
import os
import sys

from pagedkv.api.errors import ConfigError

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def setup_logging(level: str | None = None) -> None:
    """Show pagedkv's log lines at `level`, or PAGEDKV_LOG_LEVEL, or INFO.

    A program that configured logging itself (a handler on the root or on "pagedkv") keeps its own configuration, unless
    `level` is given.
    """
    logger = logging.getLogger("pagedkv")
    wanted = (level or os.environ.get("PAGEDKV_LOG_LEVEL") or "INFO").upper()
    if wanted not in _LEVELS:
        raise ConfigError(f"log level {wanted!r} is not one of {', '.join(_LEVELS)}")
    if level is None and (logger.handlers or logging.getLogger().handlers):
        return
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(wanted)
