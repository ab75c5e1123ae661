"""Whether a model fits, from answers made by hand, and from a child process that dies or hangs."""

from __future__ import annotations

import pytest

from pagedkv.diagnosis import model as models
from pagedkv.diagnosis.model import ModelCheck, model_findings

ADVICE = [
    {"setting": "weights", "value": "Q4_0", "effect": "half of it", "sequences": 1},
    {"setting": "max_model_len", "value": "300", "effect": "all 4 sequences fit at once", "sequences": 4},
]


def facts(*, blocks=1001, refusal=None, advice=(), error=None, kind=None):
    plan = {"refusal": refusal, "blocks": blocks, "settings": {"max_model_len": 8000, "block_size": 16}}
    plan["advice"] = list(advice)
    return {"name": "my model", "plan": None if error else plan, "summary": [], "error": error, "kind": kind}


def test_a_model_that_fits_is_no_finding():
    assert list(model_findings(facts(blocks=501))) == [] and list(model_findings(None)) == []  # 500 x 16 = 8000


def test_a_cache_below_the_longest_sequence_is_a_warning_with_a_length_that_fits():
    (finding,) = model_findings(facts(blocks=500, advice=ADVICE))
    assert finding.level == "warning" and "7984 tokens, its longest sequence 8000" in finding.what
    assert finding.command == "pagedkv generate 'my model' --max-model-len 300"
    assert "all 4 sequences fit at once" in finding.why
    (finding,) = model_findings(facts(blocks=500, advice=ADVICE[:1]))
    assert finding.command == "pagedkv plan 'my model'"


def test_a_model_that_does_not_fit_is_broken():
    (finding,) = model_findings(facts(refusal="the cache does not fit: 2 blocks take 1 GiB", advice=ADVICE))
    assert (finding.level, finding.what) == ("broken", "my model does not fit") and "2 blocks" in finding.why


@pytest.mark.parametrize(
    ("error", "kind", "what", "command"),
    [
        ("no such file", "ModelError", "my model cannot run", "pagedkv doctor demo"),
        (
            "needs transformers: pip install transformers",
            "ModelError",
            "my model cannot run",
            "pip install transformers",
        ),
        (
            "no head dim 7",
            "UnsupportedError",
            "my model cannot run on the backend that would be chosen",
            "pagedkv backends --model 'my model'",
        ),
    ],
)
def test_a_model_that_is_refused_is_broken_with_the_cause(error, kind, what, command):
    (finding,) = model_findings(facts(error=error, kind=kind))
    assert (finding.level, finding.what, finding.why, finding.command) == ("broken", what, error, command)


@pytest.mark.parametrize(
    ("backend", "loads", "why"), [(None, True, "no backend can be used"), ("cpu", False, "torch does not load")]
)
def test_a_model_that_could_not_be_looked_at_is_not_forgotten(monkeypatch, backend, loads, why):
    monkeypatch.setattr(models, "CHILD", "time:sleep")
    check = ModelCheck("m", backend)
    answer = check.facts(torch_loads=loads)
    check.close()
    (finding,) = model_findings(answer)
    assert (finding.level, finding.what, finding.why) == ("note", "m was not looked at", why)


def looked(monkeypatch, body, tmp_path, limit):
    name = f"model_child_{tmp_path.name}"
    source = "import os, time\nfrom pagedkv.plugins.child import open_channel\ndef child(payload):\n"
    (tmp_path / f"{name}.py").write_text(f"{source}    send = open_channel()\n    send({{'ready': 1}})\n    {body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(models, "CHILD", f"{name}:child")
    check = ModelCheck("m", "cpu", limit)
    try:
        return check.facts()
    finally:
        check.close()


@pytest.mark.parametrize(
    ("body", "said"),
    [("time.sleep(60)", "no answer to 'model' within 1 s"), ("os.kill(os.getpid(), 9)", "SIGKILL")],
)
def test_a_child_that_hangs_or_dies_is_said(monkeypatch, tmp_path, body, said):
    answer = looked(monkeypatch, body, tmp_path, 1.0)
    (finding,) = model_findings(answer)
    assert said in finding.why and finding.level == "broken" and finding.command
