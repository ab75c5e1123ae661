"""What `pagedkv bench --scenario` shows: one row an engine, and in words what the figures stand on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from pagedkv.cli.tables import print_table
from pagedkv.config import show_bytes

if TYPE_CHECKING:
    from pagedkv.cli.scenario_bench import Measured
    from pagedkv.cli.scenarios import Work

_COLUMNS = (
    "",
    "first token",
    "worst",
    "tokens/s",
    "prompt tokens: device",
    "host",
    "computed",
    "computed again",
    "preempted: swap",
    "recompute",
    "blocks out",
    "in",
    "copied",
)


def rows(work: Work, runs: Sequence[Measured]) -> list[dict[str, Any]]:
    """One engine each as JSON values: seconds, tokens, blocks, bytes."""
    from pagedkv.cli.machine import machine
    from pagedkv.cli.scenario_bench import differing

    facts, different = machine(), differing(runs)
    return [
        {
            "scenario": work.scenario,
            "setting": run.kind,
            "seed": work.seed,
            "work": _work(work),
            **run.figures(),
            "cache": _cache(work, run),
            "differing_answers": different,
            "batch_invariant": "batch_invariant" in run.choice.features,
            "machine": {**facts, **run.facts},
        }
        for run in runs
    ]


def _work(work: Work) -> dict[str, Any]:
    return {
        "about": work.about,
        "requests": len(work.asks),
        "tokens": work.tokens,
        "output_len": work.output_len,
        "concurrency": work.concurrency,
    }


def _cache(work: Work, run: Measured) -> dict[str, Any]:
    memory, size = run.memory, run.choice.block_size
    usable = memory.num_blocks - 1
    return {
        "blocks": usable,
        "block_size": size,
        "share": usable * size / work.tokens,
        "host_blocks": 0 if memory.host is None else memory.host.blocks,
        "host_is_shared": memory.host is not None and memory.host.shared,
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """The table between what was done and what is to be known of it."""
    work, cache = rows[0]["work"], rows[0]["cache"]
    click.echo(
        f"{rows[0]['scenario']}: {work['about']}; {work['requests']} requests, {work['concurrency']} at once, "
        f"{work['tokens']} tokens in all\n"
        f"the cache holds {cache['blocks']} blocks of {cache['block_size']}, {cache['share']:.0%} of them; host memory "
        f"{rows[-1]['cache']['host_blocks']} blocks\n"
    )
    print_table(_COLUMNS, [_cells(row) for row in rows])
    click.echo("\n" + "\n".join(notes(rows)))


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether the answers are the same, and where host memory is no other memory."""
    lines = [_sameness(rows)] if len(rows) > 1 else []
    backend = rows[0]["machine"]["backend"]
    if len(rows) == 1:
        lines.append(f"host memory: backend {backend} has none beside its own, so there is no swap to compare with")
    if any(row["cache"]["host_is_shared"] for row in rows):
        lines.append(f"host memory: backend {backend} keeps its cache in the same RAM; copies stay within it")
    if not rows[0]["machine"]["prefix_caching"]:
        lines.append("host tier: left out, as prefix caching is off")
    return lines


def _sameness(rows: Sequence[Mapping[str, Any]]) -> str:
    different, requests = rows[0]["differing_answers"], rows[0]["work"]["requests"]
    if not different:
        return f"answers: the same token ids with all {len(rows)} settings"
    why = (
        "" if rows[0]["batch_invariant"] else "; results depend on the batch here (--batch-invariant keeps them equal)"
    )
    return f"answers: {different} of {requests} requests got other token ids with another setting{why}"


def _cells(row: Mapping[str, Any]) -> list[str]:
    first = row["time_to_first_token"]
    return [
        row["setting"],
        f"{first['median'] * 1000:.0f} ms",
        f"{first['max'] * 1000:.0f} ms",
        f"{row['tokens_per_second']:.1f}",
        *(f"{row[f'{name}_tokens']}" for name in ("device_cached", "host_cached", "computed_prompt", "recomputed")),
        *(f"{row[f'preemptions_by_{name}']}" for name in ("swap", "recompute")),
        f"{row['blocks_out']}",
        f"{row['blocks_in']}",
        show_bytes(row["bytes_out"] + row["bytes_in"]),
    ]
