"""`pagedkv plan --measure`: the standard work on the real engine, beside what was predicted for it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pagedkv.api.errors import ConfigError
from pagedkv.cli.standard_work import Bench, Measured, Work
from pagedkv.cli.tables import print_table
from pagedkv.planning.plan import BATCHES, Plan, Prediction, speed_of
from pagedkv.planning.speed import Interval
from pagedkv.progress import counting_bar, loading_bar

INPUT_LEN, OUTPUT_LEN = 128, 32
ROUNDS = 2
_OWN = ("max_model_len", "max_num_seqs", "num_blocks", "kv_cache_memory")
"""Settings of the plan that the work sets for itself."""


def measured(plan: Plan, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each number of sequences: tokens a second of decode and prefill, predicted and measured.

    Raises `ConfigError` where the planned device is not this machine's.
    """
    prediction = _measurable(plan)
    work = Work(input_len=INPUT_LEN, output_len=OUTPUT_LEN)
    named = {name: value for name, value in settings.items() if name not in _OWN}
    named["backend"] = plan.fit.target.selected.name
    with loading_bar() as progress:
        bench = Bench(plan.config.model, work, max(BATCHES), named, progress)
    with bench, counting_bar("Measuring", len(BATCHES) * (ROUNDS + 1)) as advance:
        return [_row(plan, prediction, batch, _runs(bench, batch, advance)) for batch in BATCHES]


def _measurable(plan: Plan) -> Prediction:
    if not plan.fit.target.real or plan.ranks > 1:
        raise ConfigError(
            "--measure runs the model here, and the plan is for another device: leave out --device, --memory and "
            "--tensor-parallel-size"
        )
    if plan.prediction is None:
        raise ConfigError("--measure has no prediction to compare with, as the log says; choose another backend")
    return plan.prediction


def _runs(bench: Bench, batch: int, advance: Any) -> list[Measured]:
    bench.warm_up(batch)
    advance()
    runs = []
    for number in range(1, ROUNDS + 1):
        runs.append(bench.run(batch, number))
        advance()
    return runs


def _row(plan: Plan, prediction: Prediction, batch: int, runs: Sequence[Measured]) -> dict[str, Any]:
    speed = speed_of(plan.fit, prediction.rates)
    gaps = statistics.median(statistics.median(run.gaps) for run in runs)
    prompts = statistics.median(max(run.first) for run in runs)
    return {
        "sequences": batch,
        "decode": _compared(speed.decode(batch, INPUT_LEN + OUTPUT_LEN // 2), batch / gaps),
        "prefill": _compared(speed.prefill(INPUT_LEN, batch), batch * INPUT_LEN / prompts),
    }


def _compared(predicted: Interval, found: float) -> dict[str, Any]:
    """`error`: by how much the measured speed is above the middle of the interval, as a share of that middle."""
    return {
        **predicted.figures(),
        "measured": found,
        "error": found / predicted.middle - 1,
        "inside": predicted.low <= found <= predicted.high,
    }


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """The rows as a table on standard output."""
    cells = [
        (str(row["sequences"]), kind, f"{one['low']:.1f} to {one['high']:.1f}", f"{one['measured']:.1f}", _error(one))
        for row in rows
        for kind, one in (("decode", row["decode"]), ("prefill", row["prefill"]))
    ]
    print_table(("sequences", "tokens a second", "predicted", "measured", "off the middle"), cells)


def _error(one: Mapping[str, Any]) -> str:
    return f"{one['error']:+.0%}{'' if one['inside'] else ', outside'}"
