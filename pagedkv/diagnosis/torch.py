"""torch, imported in a child process: what it was built for, or which file keeps it from loading."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pagedkv.diagnosis.findings import Finding
from pagedkv.diagnosis.known import known
from pagedkv.plugins.child import Child
from pagedkv.plugins.probing import START_LIMIT

IMPORT_LIMIT = 30.0
"""Seconds that importing torch may take: on a cold disk it reads a gigabyte."""

INSTALL = "pip install torch"
AGAIN = "pip install --force-reinstall torch"
_FILE = re.compile(r"[\w.+/-]*?(lib[\w.+-]*\.(?:so|dylib)[\w.]*|\b[\w.+-]+\.dll\b)")


class TorchCheck:
    """The child at work: it is started at once and answers later, so that other checks run meanwhile."""

    def __init__(self, limit: float = IMPORT_LIMIT) -> None:
        self._limit = limit
        self._missing = importlib.util.find_spec("torch") is None
        payload = json.dumps(list(known().architectures))
        self._child = None if self._missing else Child(payload, "pagedkv.diagnosis.torch_child:torch_child")

    def facts(self) -> dict[str, Any]:
        """version, builds (toolkit -> version), architectures, seconds of the import; or error, the first cause last.

        `installed` is False where there is no torch, `hangs` True where it was stopped.
        """
        unknown: dict[str, Any] = {"version": None, "builds": {}, "architectures": [], "seconds": None}
        return {"installed": not self._missing, **unknown, "hangs": False, "error": [], **self._answer()}

    def _answer(self) -> dict[str, Any]:
        if self._child is None:
            return {}
        try:
            self._child.answer("ready", START_LIMIT)
            answer: dict[str, Any] = self._child.answer("torch", self._limit)
        except TimeoutError:
            said = f"not imported within {self._limit:g} s, so it was stopped{self._child.last_output()}"
            return {"hangs": True, "error": [said]}
        except EOFError:
            return {"error": [f"importing it: {self._child.how_it_ended()}{self._child.last_output()}"]}
        return answer

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.end()


def torch_findings(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Why nothing runs with this torch."""
    if not facts["installed"]:
        why = "every model runs on it, whatever the backend"
        yield Finding(level="broken", about="torch", what="torch is not installed", why=why, command=INSTALL)
    elif facts["hangs"]:
        (said,) = facts["error"]
        what, command = "importing torch hangs", "python -X faulthandler -X importtime -c 'import torch'"
        yield Finding(level="broken", about="torch", what=what, why=said, command=command)
    elif facts["error"]:
        yield _broken(facts["error"])


def _broken(causes: list[str]) -> Finding:
    why, command = " <- ".join(causes), AGAIN
    if file := missing_file(causes):
        library = known().library(file)
        why = f"{file}: {library.why}; {why}" if library else f"{file} cannot be opened; {why}"
        command = library.command if library else AGAIN
    return Finding(level="broken", about="torch", what="torch does not load", why=why, command=command)


def missing_file(causes: list[str]) -> str | None:
    """The library file that the first cause of an import error names, without its folder."""
    found = (_FILE.search(cause) for cause in reversed(causes))
    return next((match[1] for match in found if match), None)
