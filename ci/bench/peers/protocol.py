"""One engine in a process of its own: jobs come as JSON lines on standard input, answers go to standard output.

    python run_NAME.py '{"model": ..., "folder": ..., "dtype": ..., "threads": ..., "limits": {...}}'

`limits`: "requests" at once, "tokens" of one request, and "cache_numbers", the keys and values of one token in all
layers. The first answer describes the engine. A job is {"prompts": token ids [batch][input_len], "output_len"}; its
answer has the tokens and the figures of `Clock.figures`, times in seconds. What a library prints goes to
standard error.

Every peer runs in an environment of its own, so this module imports the standard library alone.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

CACHE_SLACK = 1.25
"""Room for blocks that are not full, and for what an engine keeps free."""


class Clock:
    """When each request got each of its tokens, in seconds from the start of the run."""

    def __init__(self, requests: int, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._began = now()
        self.stamps: list[list[float]] = [[] for _ in range(requests)]

    def token(self, request: int) -> None:
        """Request number `request` has one more token."""
        self.stamps[request].append(self._now() - self._began)

    def tokens(self) -> None:
        """Every request has one more token."""
        for request in range(len(self.stamps)):
            self.token(request)

    def figures(self) -> dict[str, Any]:
        """The whole run's speed, prefill included; the median first token; times between tokens of one request."""
        seconds = self._now() - self._began
        count = sum(map(len, self.stamps))
        gaps = [after - before for stamps in self.stamps for before, after in pairwise(stamps)]
        return {
            "seconds": seconds,
            "output_tokens": count,
            "tokens_per_second": count / seconds,
            "time_to_first_token": statistics.median(stamps[0] for stamps in self.stamps),
            "time_between_tokens_p50": statistics.median(gaps) if gaps else None,
        }


Generate = Callable[[Sequence[Sequence[int]], int, Clock], list[list[int]]]
"""generate(prompts, output_len, clock) -> the greedy tokens of each; the end token is a token like any other."""
Run = Callable[..., dict[str, Any]]
"""run(prompts, output_len, and whatever else the job says by name) -> the figures and the tokens."""


def timed(generate: Generate) -> Run:
    """A run with a clock; an engine that gives another number of tokens than it was asked for ends here."""

    def run(prompts: Sequence[Sequence[int]], wanted: int) -> dict[str, Any]:
        clock = Clock(len(prompts))
        tokens = generate(prompts, wanted, clock)
        figures = clock.figures()
        for counts in ([len(row) for row in tokens], [len(stamps) for stamps in clock.stamps]):
            if counts != [wanted] * len(prompts):
                raise SystemExit(f"{counts} tokens came instead of {wanted} for each of {len(prompts)} prompts")
        return {**figures, "tokens": tokens}

    return run


def serve(load: Callable[[Mapping[str, Any]], tuple[Run, dict[str, Any]]]) -> None:
    """Load the engine that the command line describes, then answer jobs until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    began = time.perf_counter()
    given = json.loads(sys.argv[1])
    run, facts = load(given)
    described = {"load_seconds": time.perf_counter() - began, "threads": given["threads"], **facts}
    print(json.dumps(described), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(run(job.pop("prompts"), job.pop("output_len"), **job)), file=answers, flush=True)


def cache_bytes(given: Mapping[str, Any], bytes_per_number: int) -> int:
    """A cache that holds all requests at their longest."""
    limits = given["limits"]
    numbers = limits["requests"] * limits["tokens"] * limits["cache_numbers"]
    return int(numbers * bytes_per_number * CACHE_SLACK)
