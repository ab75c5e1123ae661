"""`pagedkv backends --model`: of each backend, what it and the model would agree on, or every reason against."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from pagedkv.cli import backends as cli
from pagedkv.cli.main import pagedkv as command
from pagedkv.plugins import probe_all
from tests.helpers.engine_rig import engine, folder
from tests.helpers.plugin_dists import descriptor, install

ABLE = """
    CAPABILITIES = Capabilities(
        dtypes=("fp32",), kv_dtypes=("fp32",), block_sizes=(frozenset({16, 128}),), head_dims=((4, 4, 256),),
        preferred_block_size=128, features=frozenset({"mixed_batch", "prefix_hit"}),
    )
"""


@pytest.fixture(scope="module")
def statuses(tmp_path_factory):
    """Of a few plugins beside what comes along, asked once: able, narrow, by name only, absent, broken."""
    home, sources = (
        tmp_path_factory.mktemp("sites"),
        {
            "able": descriptor("able", score=20, capabilities=ABLE),
            "narrow": descriptor("narrow", score=30),
            "named": descriptor("named", score=0, capabilities=ABLE),
            "absent": descriptor("absent", score=0, reason="no card; pip install 'absent[all]'"),
            "broken": "import no_such_vendor",
        },
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, source in sources.items():
            install(home / name, source, name=name, distribution=f"{name}-dist", module=f"{name}_of_backends")
            patch.syspath_prepend(str(home / name))
        return probe_all([*sources, "cpu"])


@pytest.fixture
def run(statuses, monkeypatch):
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)
    monkeypatch.setattr(cli, "probe_all", lambda: statuses)
    return lambda *arguments: CliRunner().invoke(command, ["backends", *arguments])


@pytest.fixture
def rows(run):
    def ask(*arguments):
        result = run("--model", str(folder()), "--json", *arguments)
        assert result.exit_code == 0, result.stderr
        return {row["name"]: row for row in json.loads(result.stdout)}

    return ask


def test_a_yes_says_what_would_be_chosen(rows):
    model = rows()["able"]["model"]
    assert (model["ok"], model["reasons"]) == (True, [])
    choice = model["choice"]
    assert (choice["dtype"], choice["kv_dtype"], choice["block_size"]) == ("fp32", "fp32", 128)
    assert choice["features"] == ["mixed_batch", "prefix_hit"]
    assert "block_size 128: preferred by able" in choice["notes"]


def test_the_choice_is_the_one_that_an_engine_makes(rows):
    said = rows("--block-size", "4")["cpu"]["model"]["choice"]
    with engine() as llm:
        made = llm.engine.parts.choice
    assert (said["dtype"], said["kv_dtype"], said["block_size"]) == (made.dtype, made.kv_dtype, made.block_size)
    assert said["features"] == sorted(made.features)


def test_a_no_has_every_reason(rows):
    model = rows()["narrow"]["model"]
    assert (model["ok"], model["choice"]) == (False, None)
    text = "\n".join(model["reasons"])
    assert "head_dim of layers 0-2=12; accepted: 64, 128" in text
    assert "feature='mixed_batch'" in text and "feature='prefix_hit'" in text


def test_what_cannot_be_used_at_all_says_that(rows):
    found = rows()
    assert found["absent"]["model"]["reasons"] == ["device 0 (fake card): no card; pip install 'absent[all]'"]
    assert not found["broken"]["model"]["ok"] and "no_such_vendor" in found["broken"]["model"]["reasons"][0]


def test_one_that_is_used_by_name_only_is_explained_and_still_asked(rows):
    row = rows()["named"]
    assert row["model"]["ok"] and row["model"]["choice"]["block_size"] == 128
    assert row["reasons"] == ["device 0 (fake card): used only when chosen by name"]


def test_the_settings_of_an_engine_are_taken_as_given(rows):
    found = rows("--dtype", "bfloat16", "--block-size", "24", "--kv-cache-dtype", "half")
    assert found["able"]["model"]["reasons"] == [
        "backend able does not support dtype='bf16'; accepted: fp32",
        "backend able does not support kv_dtype='fp16'; accepted: fp32",
        "backend able does not support block_size=24; accepted: 16, 128; leave it unset for 128",
    ]
    assert rows("--block_size", "16")["able"]["model"]["choice"]["block_size"] == 16


def test_the_table_has_a_column_and_every_reason(run):
    lines = run("--model", str(folder())).stdout.splitlines()
    assert "model" in lines[0].split()
    (able,) = [line for line in lines if line.startswith("able")]
    assert "yes: fp32, cache fp32, blocks of 128" in able
    text = " ".join(" ".join(lines).split())
    assert "head_dim of layers 0-2=12; accepted: 64, 128" in text and "used only when chosen by name" in text


def test_without_a_model_nothing_is_said_of_one(run):
    (able,) = [row for row in json.loads(run("--json").stdout) if row["name"] == "able"]
    assert "model" not in able and "model" not in run().stdout.splitlines()[0].split()


def test_no_weight_is_read_and_no_plugin_imported(rows, tmp_path):
    rows()
    assert not [name for name in sys.modules if name.endswith("_of_backends")]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--dtype", "float32"], 2, "--dtype concerns a model; give --model too"),
        (["--block-size", "16", "--kv-cache-dtype", "auto"], 2, "--block-size, --kv-cache-dtype concern a model"),
        (["--model", "MODEL", "--dtype", "int3"], 2, "dtype='int3' is not one of auto, float32"),
        (["--model", "MODEL", "--block-size", "0"], 2, "block_size=0 must be a whole number of tokens, at least 1"),
        (["--model", "no/such/folder/here"], 1, "no/such/folder/here"),
    ],
)
def test_what_is_wrong_with_the_call_is_told(run, arguments, code, said):
    result = run(*[str(folder()) if a == "MODEL" else a for a in arguments])
    assert result.exit_code == code and said in result.stderr and result.stdout == ""


def test_the_help_has_examples(run):
    text = run("--help").output
    assert "pagedkv backends --model demo" in text and "its weights are not read" in " ".join(text.split())
