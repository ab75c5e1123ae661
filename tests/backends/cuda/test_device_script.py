"""The prepared scripts for a day with a card: that they parse, and that what measures gives right results."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagedkv.models.hf_config import parse_hf_config
from tests.backends.cuda.double import DelayingRuntime, double

FOLDER = Path(__file__).resolve().parents[3] / "ci" / "device"


def loaded(name):
    """A script of the folder as a module."""
    spec = importlib.util.spec_from_file_location(f"ci_device_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def measure():
    return loaded("measure")


@pytest.mark.parametrize("name", ["gpu.sh", "prepare.sh"])
def test_the_scripts_parse(name):
    subprocess.run(["bash", "-n", str(FOLDER / name)], check=True)


PYTHON = """#!/bin/bash
# Stands in for Python: what is read from standard input runs, all else is noted, and writes the files that it would.
if [ "$1" = - ]; then exec "$REAL" "$@"; fi
echo "$*" >> "$CALLS"
if [[ "$*" == *matplotlib* ]]; then exit "${FAILS:-0}"; fi
while [ $# -gt 0 ]; do
  if [ "$1" = --json ] && [[ "$2" == */* ]]; then echo "$CERTIFICATE" > "$2"; fi
  if [ "$1" = --output ]; then echo '{}' > "$2"; fi
  shift
done
"""


def rehearsed(tmp_path, *, fails="0"):
    """gpu.sh with a stand-in for Python and no card: (process, files that come back, Python's arguments)."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in {"python3": PYTHON, "nvidia-smi": "#!/bin/bash\necho GPU 0\n"}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    own = {"PATH": f"{tools}:/usr/bin:/bin", "OUT": str(tmp_path / "out"), "SITE": str(tmp_path / "site")}
    own |= {"CALLS": str(tmp_path / "calls"), "REAL": sys.executable, "FAILS": fails}
    own["CERTIFICATE"] = json.dumps({"laws": [{"cases": [{"id": "a", "outcome": "passed"}]}]})
    done = subprocess.run(["bash", str(FOLDER / "gpu.sh")], env=own, capture_output=True, text=True, timeout=60)
    files = {path.name: path for path in (tmp_path / "out").iterdir()}
    return done, files, (tmp_path / "calls").read_text().splitlines()


def test_a_rehearsal_of_the_day_brings_every_file(tmp_path):
    done, files, calls = rehearsed(tmp_path, fails="1")  # without matplotlib
    assert done.returncode == 0, done.stdout
    assert set(files) == {"log.txt", "parts.json", "kernels.json", "engine.json", "engine-8b.json", "cuda.json"}
    parts = json.loads(files["parts.json"].read_text())
    assert len(parts) == 7 and all(part == {"passed": 1, "others": []} for part in parts.values())
    assert "plot left out, matplotlib is not here" in files["log.txt"].read_text()
    order = ["doctor --backend", "ci/device/measure.py", "llama-3.2-1b.json", "llama-3.1-8b.json", "cuda.json -q"]
    places = [next(place for place, call in enumerate(calls) if words in call) for words in order]
    assert places == sorted(places) and places[-1] == len(calls) - 1
    assert any("kernels=torch" in call for call in calls)


def test_every_argument_of_the_script_is_one_that_its_programs_know(tmp_path, measure):
    _, _, calls = rehearsed(tmp_path)
    engine = loaded("engine")
    for name, module in (("measure", measure), ("engine", engine)):
        lines = [call for call in calls if f"ci/device/{name}.py" in call]
        assert lines
        for line in lines:
            given = module.arguments(line.split()[1:])
            assert given.backend == "cuda" and given.output.parent.name == "out"
    assert any("ci/device/plot.py" in call for call in calls)


def test_the_steps_fit_into_one_call():
    """Limits in seconds, the parts of the kit side by side; the whole kit gets what is left of LIMIT."""
    text = (FOLDER / "gpu.sh").read_text()
    steps = [int(seconds) for seconds in re.findall(r"^ +(?:CXX=false )?step [\w-]+ (\d+) ", text, re.MULTILINE)]
    steps += [int(found) for found in re.findall(r"then step [\w-]+ (\d+) ", text)]
    parts = int(re.search(r"timeout -k 5 (\d+) .*certify", text)[1])
    limit = int(re.search(r"LIMIT:-(\d+)", text)[1])
    assert len(steps) == 8 and limit + 5 < 8 * 60
    assert sum(steps) + parts < 8 * 60 + 45, "limits are generous; together they nearly fit even if all are used up"


def test_the_picture(tmp_path):
    row = {"rows": 1, "queries": 1, "context": 512, "share_of_limit": 0.5, "seconds": 1.0, "seconds_sdpa": 2.0}
    kernels = {"device": "a card", "dtype": "bf16", "attention": [row, row | {"rows": 8}]}
    engine = {"shape": "a shape", "pagedkv": {"1": 10.0, "8": 60.0}, "transformers": {"1": 5.0, "8": 30.0}}
    files = [tmp_path / name for name in ("kernels.json", "engine.json", "figures.png")]
    for path, value in zip(files, (kernels, engine), strict=False):
        path.write_text(json.dumps(value))
    loaded("plot").main([str(path) for path in files])
    assert files[2].read_bytes()[:4] == b"\x89PNG" and files[2].stat().st_size < 1 << 20


def test_a_wheel_that_the_machine_has_is_left_alone():
    body = re.search(r"missing\(\).*?'END'\n(.*?)\nEND", (FOLDER / "gpu.sh").read_text(), re.DOTALL)[1]
    names = ["numpy-1.0-py3-none-any.whl", "setuptools-99-py3-none-any.whl", "no_such_thing-1-py3-none-any.whl"]
    done = subprocess.run([sys.executable, "-", *names], input=body, capture_output=True, text=True, check=True)
    assert done.stdout.split() == names[1:]


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


@pytest.mark.parametrize(("name", "layers"), [("llama-3.2-1b", 16), ("llama-3.1-8b", 32)])
def test_the_shapes_of_models_are_ones_that_are_read(name, layers):
    found = parse_hf_config(json.loads((FOLDER / f"{name}.json").read_text()))
    assert (found.vocab_size, len(found.layer_specs())) == (128256, layers)


def test_a_shape_can_have_fewer_layers(tmp_path):
    loaded("engine").shaped(FOLDER / "llama-3.1-8b.json", str(tmp_path), 8)
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 8


def test_equal_tokens_are_counted_up_to_the_first_that_differs():
    same = loaded("engine")._same
    assert [same([1, 2, 3], other) for other in ([1, 2, 3], [1, 9, 3], [9, 2, 3])] == [3, 1, 0]
