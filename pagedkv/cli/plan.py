"""`pagedkv plan`: what a model needs, what fits on a device, and how fast it would be, before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pagedkv.cli.common import model_argument
from pagedkv.cli.model_options import engine_settings, some_options
from pagedkv.cli.tables import print_table
from pagedkv.config import EngineConfig, parse_bytes

if TYPE_CHECKING:
    from pagedkv.planning.plan import Plan

SETTINGS = (
    "backend",
    "backend_option",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "kv_cache_memory",
    "num_blocks",
    "swap_space",
    "enforce_eager",
    "load_format",
    "model_impl",
    "revision",
)
"""The engine's options that change a plan."""
_PAIRS = ("", "")


@click.command("plan")
@model_argument
@click.option(
    "--device",
    metavar="NAME",
    help="A device that need not be here, such as rtx-4090 or h200; cpu; or the index of one of this machine's.",
)
@click.option("--memory", metavar="SIZE", help='Plan for this much memory instead of the device\'s, such as "24GiB".')
@click.option(
    "--tensor-parallel-size",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Plan one of N ranks. Running on several ranks is not built yet.",
)
@click.option("--measure", is_flag=True, help="Also run 1, 8 and 32 requests here, and compare with the prediction.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    metavar="FILE",
    help="Draw memory against concurrent sequences (needs matplotlib).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@some_options(*SETTINGS)
@click.pass_context
def plan(
    context: click.Context,
    model: str,
    device: str | None,
    memory: str | None,
    tensor_parallel_size: int,
    measure: bool,
    plot: Path | None,
    as_json: bool,
    settings: dict[str, Any],
) -> None:
    """Say what MODEL needs, what fits, and how fast it would be; no weight is read.

    For this machine the figures are the engine's own: the plan has the blocks that it then allocates. For a device that
    is not here, memory and speed are published figures, and the cache is counted by formula. Speeds are intervals; the
    text says from what. Where not all sequences fit at full length, the changes that help follow, each with its number.

    Exit code 1 when the engine would not even start, as the weights or the first block do not fit.

    \b
    pagedkv plan demo
    pagedkv plan ./Llama-3-8B --device rtx-4090 --max-model-len 8192 --max-num-seqs 16
    pagedkv plan ./Llama-3-8B --memory 24GiB --kv-cache-dtype bfloat16 --json
    pagedkv plan ./Llama-3-8B --device h200 --plot memory.png
    pagedkv plan demo --measure
    """
    from pagedkv.planning.plan import NOTHING, as_record, planned

    size = None if memory is None else parse_bytes(memory, "--memory")
    _check_output(plot)
    config = EngineConfig.of(model=model, **engine_settings(settings))
    with planned(config, device=device, memory=size, ranks=tensor_parallel_size) as made:
        rows = _measured(made, settings) if measure else None
        if plot is not None:
            _draw(made, plot)
        if as_json:
            click.echo(json.dumps({**as_record(made), "measured": rows}, indent=2))
        else:
            _show(made, rows)
        context.exit(1 if made.verdict == NOTHING else 0)


def _check_output(plot: Path | None) -> None:
    if plot is not None and not plot.resolve().parent.is_dir():
        raise click.UsageError(f"--plot {plot}: there is no folder {plot.resolve().parent}; make it first")


def _draw(made: Plan, path: Path) -> None:
    from pagedkv.planning.plot import draw

    draw(made, path)


def _measured(made: Plan, settings: dict[str, Any]) -> list[dict[str, Any]]:
    from pagedkv.cli.plan_measure import measured

    return measured(made, engine_settings(settings))


def _show(made: Plan, measured: list[dict[str, Any]] | None) -> None:
    from pagedkv.planning import report

    print_table(_PAIRS, list(report.lines(made)))
    click.echo()
    print_table(("tokens each", "sequences at once", "memory"), report.sequence_rows(made))
    if made.prediction is not None:
        click.echo()
        print_table(("tokens a second", "expected"), report.speed_rows(made.prediction))
        click.echo(report.assumptions(made.prediction))
    if made.advice:
        click.echo(f"\nfor {report.asked(made)} at once, one of")
        print_table(_PAIRS, [("-", str(advice)) for advice in made.advice])
    if measured is not None:
        from pagedkv.cli.plan_measure import show

        click.echo()
        show(measured)
