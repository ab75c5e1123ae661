"""What spawned worker processes run; a module of its own, so that they can import it."""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from pagedkv import plugins
from pagedkv.api.errors import BackendError
from pagedkv.plugins import selection


def in_worker(identity: plugins.Identity, *sites: Path) -> dict[str, Any]:
    """Reselect in a fresh process that finds plugins in `sites` only (and what this project installs)."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_reselect, identity, [str(site) for site in sites]).result(60)


def _reselect(identity: plugins.Identity, sites: list[str]) -> dict[str, Any]:
    sys.path[:] = [*sites, *(folder for folder in sys.path if folder not in sites and "pytest-" not in folder)]
    selection.probe_all = _never  # type: ignore[assignment]
    try:
        selected = plugins.reselect(identity)
    except BackendError as error:
        return {"error": type(error).__name__, "text": str(error)}
    imported = sorted(name for name in sys.modules if name.startswith("pagedkv_"))
    return {"identity": selected.identity, "why": selected.why, "imported": imported}


def _never(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("a worker detects nothing")
