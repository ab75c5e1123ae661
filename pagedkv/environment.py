"""The environment variables that pagedkv reads, in one place."""

from __future__ import annotations

import difflib
import functools
import logging
import os
import types
from collections.abc import Mapping

_log = logging.getLogger("pagedkv.environment")

PREFIX = "PAGEDKV_"

ENVIRONMENT: Mapping[str, str] = types.MappingProxyType(
    {
        "PAGEDKV_API_KEY": "a key of the server's, beside those of its options",
        "PAGEDKV_BACKEND": "the backend to use when no argument names one; empty or 'auto': the best one that is there",
        "PAGEDKV_CHECK": "1: check every law of the contract on every call",
        "PAGEDKV_LOG_LEVEL": "DEBUG, INFO, WARNING or ERROR",
    }
)
"""Every environment variable that pagedkv reads, with its meaning; another `PAGEDKV_*` name gets a warning."""
SECRETS = frozenset({"PAGEDKV_API_KEY"})
"""Those of them whose value nothing may show."""


def check_environment() -> None:
    """Warn, once a process for each, of `PAGEDKV_*` variables that pagedkv does not read."""
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in ENVIRONMENT:
            _warn_of_variable(name)


def meant(name: str) -> str | None:
    """The variable whose name is closest to a misspelt one; None where none is close."""
    # Compared without the prefix, which alone would make every pair look alike.
    ends = {known.removeprefix(PREFIX): known for known in ENVIRONMENT}
    close = difflib.get_close_matches(name.removeprefix(PREFIX), ends, n=1)
    return ends[close[0]] if close else None


@functools.cache
def _warn_of_variable(name: str) -> None:
    close = meant(name)
    advice = f"did you mean {close}?" if close else f"the names it reads: {', '.join(ENVIRONMENT)}"
    _log.warning("environment variable %s has no effect, pagedkv does not read it; %s", name, advice)
