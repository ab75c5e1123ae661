"""The threads at the pipe: whatever goes wrong there ends the engine in words, and never leaves requests waiting."""

from __future__ import annotations

import multiprocessing
import queue
from typing import Any

from pagedkv.server.messages import Failure
from pagedkv.server.remote import _read, _write


def test_u66_a_command_that_cannot_be_sent_is_told() -> None:
    here, _ = multiprocessing.Pipe()
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    commands.put(lambda: None)
    told: list[Any] = []
    _write(here, commands, told.append)
    assert [type(each) for each in told] == [Failure] and "the pipe to the engine failed" in told[0].message


def test_u66_a_message_that_cannot_be_read_is_told() -> None:
    here, there = multiprocessing.Pipe()
    there.send_bytes(b"no pickle")
    told: list[Any] = []
    _read(here, told.append)
    assert [type(each) for each in told] == [Failure] and "please report" in told[0].message


def test_the_end_of_the_pipe_is_none() -> None:
    here, there = multiprocessing.Pipe()
    there.close()
    told: list[Any] = []
    _read(here, told.append)
    assert told == [None]
