"""One handler on standard error, for programs that set nothing up and for commands."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from pagedkv.api.errors import ConfigError
from pagedkv.logs import setup_logging, start_command_logging, stop_command_logging

LOGGER = logging.getLogger("pagedkv")


def lines(script, **environment):
    """What a program writes to standard error; pytest's own handlers would be in the way here."""
    code = f"import logging\nfrom pagedkv.logs import *\n{script}\nlogging.getLogger('pagedkv.room').info('said')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == ""
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("script", "environment", "expected"),
    [
        ("setup_logging()", {}, ["INFO pagedkv.room: said"]),
        ("setup_logging(); setup_logging()", {}, ["INFO pagedkv.room: said"]),
        ("setup_logging()", {"PAGEDKV_LOG_LEVEL": "warning"}, []),
        ("setup_logging('error')", {}, []),
        ("start_command_logging(); setup_logging()", {}, ["said"]),
        ("start_command_logging('WARNING'); start_command_logging('INFO')", {}, ["said"]),
        ("logging.basicConfig(level='INFO', format='own %(message)s'); setup_logging()", {}, ["own said"]),
        ("logging.basicConfig(level='INFO'); start_command_logging()", {}, ["said"]),
    ],
)
def test_each_line_appears_once_in_the_form_of_who_set_logging_up(script, environment, expected):
    assert lines(script, **environment) == expected


def test_a_command_leaves_a_programs_logging_as_it_was():
    before = (LOGGER.handlers[:], LOGGER.level, LOGGER.propagate)
    start_command_logging("DEBUG")
    assert LOGGER.level == logging.DEBUG and len(LOGGER.handlers) == len(before[0]) + 1
    stop_command_logging()
    stop_command_logging()
    assert (LOGGER.handlers, LOGGER.level, LOGGER.propagate) == before


@pytest.mark.parametrize("call", [setup_logging, start_command_logging])
def test_a_wrong_level_is_an_error_that_names_the_right_ones(call, monkeypatch):
    with pytest.raises(ConfigError, match="level='LOUD' is no log level; use one of DEBUG, INFO, WARNING, ERROR"):
        call("LOUD")
    monkeypatch.setenv("PAGEDKV_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="PAGEDKV_LOG_LEVEL='LOUD'"):
        call()
