"""What the child process that imports torch runs: what was built into it, or every cause of why it does not load."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pagedkv.plugins.child import open_channel

_NO_BUILD = ("git_version", "debug")


def torch_child(payload: str) -> None:
    """`payload`: dotted names as JSON, which give the architectures torch was built for; it may lack them."""
    send = open_channel()
    send({"ready": True})
    try:
        answer = _loaded(json.loads(payload))
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is what a person must read
        answer = {"error": list(causes(error))}
    send({"torch": answer})


def _loaded(names: Sequence[str]) -> dict[str, Any]:
    began = time.monotonic()
    import torch

    return {
        "version": str(torch.__version__),
        "builds": _builds(vars(torch.version)),
        "architectures": [word for name in names for word in _architectures(torch, name)],
        "seconds": round(time.monotonic() - began, 2),
        "error": [],
    }


def _builds(version: dict[str, Any]) -> dict[str, str]:
    """Toolkit -> its version, of the toolkits that this torch was built with."""
    own = {name: value for name, value in version.items() if not name.startswith("_") and name not in _NO_BUILD}
    return {name: value for name, value in own.items() if isinstance(value, str) and value}


def _architectures(torch: Any, name: str) -> list[str]:
    ask = functools.reduce(lambda found, part: getattr(found, part, None), name.split("."), torch)
    return str(ask() or "").split() if callable(ask) else []


def causes(error: BaseException | None) -> Iterator[str]:
    """Each exception of a chain on one line, the first cause last."""
    while error is not None:
        yield f"{type(error).__name__}: {' '.join(str(error).split())}"
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
