"""The prepared scripts for a day with a card: that they parse, and that what measures gives right results."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagedkv.models.hf_config import parse_hf_config
from tests.backends.cuda.double import DelayingRuntime, double

FOLDER = Path(__file__).resolve().parents[3] / "ci" / "device"


@pytest.fixture(scope="module")
def measure():
    spec = importlib.util.spec_from_file_location("ci_device_measure", FOLDER / "measure.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["gpu.sh", "prepare.sh"])
def test_the_scripts_parse(name):
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)


def test_results_without_a_folder_are_refused():
    done = subprocess.run(
        ["bash", str(FOLDER / "gpu.sh")], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.returncode != 0 and "OUT=/tmp/out" in done.stderr


def test_attention_graphs_and_copies_are_compared(measure):
    backend, device = double(), {"read_bytes_per_second": 1e9, "flops_per_second": 1e9}
    for work in measure.works(small=True):
        case = measure.Case(backend, work, torch.float32)
        row = measure.measured(case, device)
        assert row["worst_difference"] < 1e-5 and row["seconds"] > 0
        if work.queries == 1:
            assert measure.graphs(case)["worst"] < 1e-5
            found = measure.copies(case, 2)
            assert found["rounds_that_differ"] == 0 and found["copy_bytes_per_second_back"] > 0
    backend.close()


def raced(measure, runtime, rounds=4):
    backend = double(runtime=runtime)
    case = measure.Case(backend, measure.Work(rows=1, queries=1, context=64), torch.float32)
    found = measure.Race(case).rounds(rounds)
    backend.close()
    return found


class Deaf(DelayingRuntime):
    """Copies that start at once, whatever they come after."""

    def copy(self, work, after):
        if after is not None:
            work()  # too early: what it comes after has not run
            return super().copy(lambda: None, after)
        return super().copy(work, after)


class Hasty(DelayingRuntime):
    """Compute that waits for no copy."""

    def wait(self, event):
        return


@pytest.mark.parametrize(("runtime", "races"), [(DelayingRuntime, 0), (Deaf, 4), (Hasty, 4)])
def test_a_copy_or_a_wait_that_comes_at_the_wrong_time_shows(measure, runtime, races):
    assert raced(measure, runtime()) == races


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_legal_order_shows(measure, seed):
    assert raced(measure, DelayingRuntime(seed)) == 0


def test_flex_attention_that_cannot_be_compiled_is_told(measure, monkeypatch):
    backend = double()
    case = measure.Case(backend, measure.Work(rows=1, queries=64, context=64), torch.float32)
    monkeypatch.setattr(torch, "compile", lambda function, **given: function)
    with torch.no_grad():
        assert measure.flex(case)["worst_difference_flex"] < 1e-5  # uncompiled, it is the same attention

    def refuse(function, dynamic):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", refuse)
    assert measure.flex(case) == {"flex": "RuntimeError: no compiler"}
    backend.close()


def test_work_is_counted_by_hand(measure):
    decode = measure.Work(rows=2, queries=1, context=100)
    assert decode.nbytes(2) == 2 * 2 * 100 * 8 * 128 * 2
    assert decode.flops == 2 * 2 * 2 * 32 * 128 * 100  # two products, a multiplication and an addition each
    prefill = measure.Work(rows=1, queries=3, context=3)
    assert prefill.flops == 2 * 2 * 32 * 128 * (1 + 2 + 3)


def test_the_shape_of_the_model_is_one_that_is_read():
    found = parse_hf_config(json.loads((FOLDER / "llama-3.2-1b.json").read_text()))
    assert (found.vocab_size, len(found.layer_specs())) == (128256, 16)
