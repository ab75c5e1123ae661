"""Whether a model fits: the engine's own budget for it on the backend that would be chosen, in a child process."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from pagedkv.api.errors import PagedKVError, UnsupportedError
from pagedkv.diagnosis.findings import Finding, command_in
from pagedkv.plugins.child import Child, open_channel
from pagedkv.plugins.probing import START_LIMIT

PLAN_LIMIT = 60.0
"""Seconds for opening the model's files, creating the backend and asking it; no weight is read."""

CHILD = "pagedkv.diagnosis.model:model_child"

SKIPPED = "skipped"
"""The kind of a model that was not looked at."""

TRY = "pagedkv doctor demo"
"""For a model that cannot be opened: one that can."""

FLAGS = ("max_model_len", "max_num_seqs", "kv_cache_dtype")
"""Advice that a command line can follow."""


class ModelCheck:
    """The child at work, started at once. `backend` is the name that would be chosen; None: there is nothing to do."""

    def __init__(self, model: str, backend: str | None, limit: float = PLAN_LIMIT) -> None:
        self._model, self._limit = model, limit
        payload = json.dumps({"model": model, "backend": backend})
        self._child = None if backend is None else Child(payload, CHILD)

    def facts(self, torch_loads: bool = True) -> dict[str, Any]:
        """name, plan (as `pagedkv plan --json` has it, or None), summary for people, error and its kind."""
        facts: dict[str, Any] = {"name": self._model, "plan": None, "summary": [], "error": None, "kind": None}
        if self._child is None or not torch_loads:
            why = "no backend can be used" if self._child is None else "torch does not load"
            return facts | {"error": why, "kind": SKIPPED}
        return facts | _answer(self._child, self._limit)

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.end()


def _answer(child: Child, limit: float) -> dict[str, Any]:
    try:
        child.answer("ready", START_LIMIT)
        answer: dict[str, Any] = child.answer("model", limit)
    except TimeoutError as error:
        return {"error": f"{error}{child.last_output()}", "kind": type(error).__name__}
    except EOFError as error:
        return {"error": f"{child.how_it_ended()}{child.last_output()}", "kind": type(error).__name__}
    return answer


def model_child(payload: str) -> None:
    """What the child process runs."""
    send = open_channel()
    send({"ready": True})
    try:
        answer = _planned(**json.loads(payload))
    except PagedKVError as error:
        answer = {"error": str(error), "kind": type(error).__name__}
    send({"model": answer})


def _planned(model: str, backend: str) -> dict[str, Any]:
    from pagedkv.config import EngineConfig
    from pagedkv.engine.setup import model_requirements

    config = EngineConfig.of(model=model, backend=backend)
    model_requirements(config)  # opens the weights' files too, which a plan does not need
    from pagedkv.planning.plan import as_record, planned
    from pagedkv.planning.report import lines

    with planned(config, speed=False) as plan:
        return {"plan": as_record(plan), "summary": [list(line) for line in lines(plan)]}


def model_findings(facts: Mapping[str, Any] | None) -> Iterator[Finding]:
    """What keeps the model from running, or from running as long as it could."""
    if facts is None:
        return
    if facts["kind"] == SKIPPED:
        yield Finding(level="note", about="model", what=f"{facts['name']} was not looked at", why=facts["error"])
    elif facts["error"] is not None:
        yield _refused(facts)
    elif facts["plan"]["refusal"] is not None:
        yield _short(facts, "broken", f"{facts['name']} does not fit", facts["plan"]["refusal"])
    elif _tokens(facts["plan"]) < facts["plan"]["settings"]["max_model_len"]:
        length = facts["plan"]["settings"]["max_model_len"]
        what = f"the cache for {facts['name']} holds {_tokens(facts['plan'])} tokens, its longest sequence {length}"
        yield _short(facts, "warning", what, "longer requests are refused when they come")


def _tokens(plan: Mapping[str, Any]) -> int:
    """What the cache holds, beside the null block."""
    return int((plan["blocks"] - 1) * plan["settings"]["block_size"])


def _refused(facts: Mapping[str, Any]) -> Finding:
    name = shlex.quote(facts["name"])
    unsupported = facts["kind"] == UnsupportedError.__name__
    return Finding(
        level="broken",
        about="model",
        what=f"{facts['name']} cannot run" + (" on the backend that would be chosen" if unsupported else ""),
        why=facts["error"],
        command=f"pagedkv backends --model {name}" if unsupported else command_in(facts["error"]) or TRY,
    )


def _short(facts: Mapping[str, Any], level: Any, what: str, why: str) -> Finding:
    """The first advice that a flag can follow, with the others to look at."""
    name = shlex.quote(facts["name"])
    fitting = [a for a in facts["plan"]["advice"] if a["value"] is not None and a["setting"] in FLAGS]
    command = f"pagedkv plan {name}"
    if fitting:
        command = f"pagedkv generate {name} --{fitting[0]['setting'].replace('_', '-')} {fitting[0]['value']}"
        why = f"{why}; with {fitting[0]['setting']}={fitting[0]['value']} {fitting[0]['effect']}"
    return Finding(level=level, about="model", what=what, why=why, command=command)
