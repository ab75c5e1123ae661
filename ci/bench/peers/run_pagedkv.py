"""pagedkv's own engine as `pagedkv bench` drives it, with default options but for dtype and threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from protocol import Run, serve

from pagedkv.cli.machine import engine_facts
from pagedkv.cli.standard_work import Bench, Work
from pagedkv.logs import setup_logging


def load(given: Mapping[str, Any]) -> tuple[Run, dict[str, Any]]:
    """The engine with prefix caching off. The option `threads` is the CPU backend's."""
    setup_logging()
    limits = given["limits"]
    settings = {"dtype": given["dtype"], "backend": "cpu", "backend_options": {"threads": given["threads"]}}
    bench = Bench(given["model"], Work(input_len=limits["tokens"] - 1, output_len=1), limits["requests"], settings)

    def run(prompts: Sequence[Sequence[int]], count: int) -> dict[str, Any]:
        measured = bench.measure([list(prompt) for prompt in prompts], count)
        return {**measured.figures(), "tokens": measured.tokens}

    return run, engine_facts(bench.parts)


if __name__ == "__main__":
    serve(load)
