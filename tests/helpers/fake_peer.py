"""A peer for tests of the comparison: it answers at once, with tokens that follow from the prompt.

The "dtype" of what it is told chooses its behaviour: "steady", "short" (a token too few), "breaks" (ends at its second
job), "absent" (does not load).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "ci" / "bench" / "peers"))
from protocol import serve, timed


def load(given):
    """Print on standard output, as libraries do, and say what was given."""
    print("a library prints this")
    kind, jobs = given["dtype"], []
    if kind == "absent":
        raise SystemExit("its library is not here")

    def generate(prompts, count, clock):
        jobs.append(count)
        if kind == "breaks" and len(jobs) == 2:
            os._exit(3)
        tokens = [[prompt[-1] + number for number in range(count)] for prompt in prompts]
        for _ in range(count):
            clock.tokens()
        return [row[:-1] for row in tokens] if kind == "short" else tokens

    return timed(generate), {"version": "7", "dtype": kind}


if __name__ == "__main__":
    serve(load)
