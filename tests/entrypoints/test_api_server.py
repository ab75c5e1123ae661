"""`python -m pagedkv.entrypoints.api_server`, the command of articles, is `pagedkv serve`."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from pagedkv.entrypoints import api_server

ARTICLE = "--model M --block-size 32 --use-ascend-memory-pool"


def test_it_is_the_command_with_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("pagedkv.server.run.serve", lambda settings, config, level: calls.append(settings) or 3)
    with pytest.raises(SystemExit) as ended:
        api_server.main(ARTICLE.split())
    assert ended.value.code == 3
    assert calls == [{"model": "M", "block_size": 32, "use_ascend_memory_pool": True}]


def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "pagedkv.entrypoints.api_server", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: python -m pagedkv.entrypoints.api_server serve [OPTIONS] ")
