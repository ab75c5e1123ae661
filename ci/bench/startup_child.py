"""`pagedkv generate` with a clock at each stage of its start; startup.py starts it as a process of its own.

    python ci/bench/startup_child.py SPAWNED MODEL [OPTION...]    # SPAWNED: time.time() when it was started

Prints the answer, then one JSON object: stage -> seconds, in the order of the start.
"""

import time

BEGAN = time.time()
"""Python itself has started. All that takes time is imported in `main`, on the clock."""

from collections.abc import Callable  # noqa: E402
from contextlib import ExitStack  # noqa: E402
from typing import Any  # noqa: E402


class Stages:
    """Seconds by stage, in the order in which the stages end."""

    def __init__(self, spawned: float) -> None:
        self.spawned = spawned
        self.seconds = {"interpreter": BEGAN - spawned}
        self.first_token = 0.0

    def around(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, its time added to the stage."""

        def timed(*args: Any, **named: Any) -> Any:
            began = time.time()
            result = call(*args, **named)
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.time() - began
            return result

        return timed

    def around_first(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call; the end of its first one is the first token."""

        def timed(*args: Any, **named: Any) -> Any:
            began = time.time()
            result = call(*args, **named)
            if not self.first_token:
                self.first_token = time.time()
                self.seconds[stage] = self.first_token - began
            return result

        return timed

    def report(self) -> dict[str, float]:
        """All stages, what lies between them, and the whole."""
        whole = self.first_token - self.spawned
        return {**self.seconds, "rest": whole - sum(self.seconds.values()), "to the first token": whole}


def main(spawned: str, model: str, *options: str) -> None:
    """Run the command and print its stages."""
    import json

    stages = Stages(float(spawned))
    run = stages.around("imports", _import)()
    with ExitStack() as stack:
        _patch(stack, stages)
        try:
            run(["generate", model, "--prompt", "Once upon a time", "--max-tokens", "1", "--quiet", *options])
        except SystemExit as end:  # click's way to return
            if end.code:
                raise
    print(json.dumps(stages.report()))


def _import() -> Callable[[list[str]], None]:
    import pagedkv.cli.generate
    import pagedkv.llm  # noqa: F401
    from pagedkv.cli.main import main as run

    return run


def _patch(stack: ExitStack, stages: Stages) -> None:
    from unittest.mock import patch

    from pagedkv import plugins
    from pagedkv.engine import setup
    from pagedkv.engine.engine import LLMEngine
    from pagedkv.models.checkpoint import Checkpoint

    checkpoints = (Checkpoint, *Checkpoint.__subclasses__())
    for owner, name, stage in (
        (plugins, "select", "selecting the backend"),
        (setup, "open_checkpoint", "opening the file"),
        (plugins, "create", "creating the backend"),
        *((cls, "tokenizer", "tokenizer") for cls in checkpoints if "tokenizer" in vars(cls)),
        (Checkpoint, "decoder", "weights"),
    ):
        stack.enter_context(patch.object(owner, name, stages.around(stage, getattr(owner, name))))
    first = stages.around_first("first step", LLMEngine.step)
    stack.enter_context(patch.object(LLMEngine, "step", first))


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
