"""From the command line to the first token, by stage: `pagedkv generate` in fresh processes, with clocks.

The first process warms the file cache and is not counted.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

CHILD = Path(__file__).with_name("startup_child.py")


def startup(model: str, repeats: int, options: Sequence[str] = ()) -> dict[str, Any]:
    """Stage -> seconds (median, least, most), in the order of the start; "to the first token" is the whole."""
    runs = [_run(model, options) for _ in range(repeats + 1)][1:]
    return {stage: spread_of([run[stage] for run in runs]) for stage in runs[0]}


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _run(model: str, options: Sequence[str]) -> dict[str, float]:
    command = [sys.executable, str(CHILD), repr(time.time()), model, *options]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise click.ClickException(f"pagedkv generate {model} ended with code {ended.returncode}: {ended.stderr}")
    stages: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return stages
