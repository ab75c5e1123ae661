"""A report for a public bug tracker: the same facts without personal paths, names of people or machines, or tokens.

What is replaced: known folders by their meaning (`~`, `<site-packages>`, `<python>`, `<here>`), other paths outside
the system's own folders by `<path>/` and their last part, then user and host names, then what looks like a token.
"""

from __future__ import annotations

import getpass
import os
import re
import site
import socket
import sys
import sysconfig
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

SYSTEM_FOLDERS = ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "opt", "proc", "run", "sbin", "sys", "usr")
COMMON_NAMES = frozenset(
    {"root", "user", "users", "admin", "nobody", "ubuntu", "debian", "runner", "localhost", "home"}
)
"""Names of users and hosts that tell nothing, and that other words contain."""

_PATH = re.compile(r"(?<![\w./<>~-])(?:[A-Za-z]:)?[\\/](?:[^\s'\"`:;,()<>|\\/]+[\\/])*[^\s'\"`:;,()<>|\\/]+")
_TOKENS = (
    re.compile(r"\b(?:hf|ghp|gho|ghs|github_pat|glpat|sk|xox[abps])[_-][\w-]{8,}"),
    re.compile(r"(?i)\b(?:bearer|token|api[_-]?key|password|secret)\b\s*[=:]?\s*[\"']?[\w+/.-]{8,}"),
    re.compile(r"(?<=://)[^/\s@]+(?=@)"),
    re.compile(r"(?i)\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"),
)


class Privacy:
    """Rewrites texts. `paths` are further personal ones, such as a model's folder; words in `kept` stay as they are."""

    def __init__(self, paths: Iterable[str] = (), kept: Collection[str] = ()) -> None:
        folders = {form: f"<path>/{Path(path).name}" for path in paths if _is_path(path) for form in _forms(path)}
        self._folders = sorted({**dict(_known_folders()), **folders}.items(), key=lambda pair: -len(pair[0]))
        self._kept = frozenset(kept)
        names = {_user(): "<user>", **dict.fromkeys(_hosts(), "<host>")}
        common = COMMON_NAMES | self._kept
        telling = (name for name in names if len(name) > 2 and name.lower() not in common)
        self._names = {name: names[name] for name in sorted(telling, key=len, reverse=True)}

    def clean(self, value: Any) -> Any:
        """A JSON value with every text in it rewritten; keys too, since a backend's may hold a device's number."""
        if isinstance(value, dict):
            return {self.text(key): self.clean(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.clean(item) for item in value]
        return self.text(value) if isinstance(value, str) else value

    def text(self, text: str) -> str:
        """One text rewritten."""
        if text in self._kept:
            return text
        for folder, mark in self._folders:
            text = re.sub(rf"{re.escape(folder)}(?=$|[^\w.-])", mark.replace("\\", r"\\"), text)
        text = _PATH.sub(_shortened, text)
        for name, mark in self._names.items():
            text = re.sub(rf"(?i)(?<![\w-]){re.escape(name)}(?![\w-])", mark, text)
        for token in _TOKENS:
            text = token.sub("<secret>", text)
        return text


def _is_path(text: str) -> bool:
    """Whether it names a file here, and not a hub id such as "org/name"."""
    return text.startswith(("/", ".", "~")) or "\\" in text or ("/" in text and Path(text).exists())


def _forms(path: str) -> set[str]:
    """The ways in which a message may spell it."""
    expanded = Path(os.path.expanduser(path))
    return {path, str(expanded), str(expanded.absolute()), str(expanded.resolve())}


def _shortened(found: re.Match[str]) -> str:
    parts = [part for part in re.split(r"[\\/]", found[0]) if part]
    if parts[0] in SYSTEM_FOLDERS or len(parts) < 2:
        return found[0]
    return f"<path>/{parts[-1]}"


def _known_folders() -> Iterable[tuple[str, str]]:
    """(folder, what it is) of every folder whose name may tell who somebody is."""
    if (home := os.path.expanduser("~")) != "~":
        yield home, "~"
    yield str(Path.cwd()), "<here>"
    yield sys.prefix, "<python>"
    for folder in (*site.getsitepackages(), site.getusersitepackages(), sysconfig.get_path("purelib")):
        yield folder, "<site-packages>"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # a container's user that has no entry
        return ""


def _hosts() -> set[str]:
    name = socket.gethostname()
    return {name, name.partition(".")[0]}
