"""docs/ascend.md and its Chinese form: what they say is held to the code, to the tables of data, and to each other."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

import pagedkv
from pagedkv.api import GroupSpec, LayerSpec, Limits, PoolSpec
from pagedkv.cli import main as cli
from pagedkv.config import EngineConfig
from pagedkv.errors import ConfigError
from pagedkv.planning.devices import find_device
from pagedkv_ascend import capabilities, environment, limits, packages
from pagedkv_ascend.attention import GATHERED, gathered
from pagedkv_ascend.descriptor import AscendDescriptor
from pagedkv_ascend.runtime import HostRuntime
from tests.backends.ascend.double import double

ROOT = Path(__file__).resolve().parents[3]
ENGLISH, CHINESE = ((ROOT / "docs" / name).read_text("utf-8") for name in ("ascend.md", "ascend.zh.md"))
both = pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["en", "zh"])
UNNAMED = {"not named": "", "未注明": ""}


def tables(text: str) -> list[list[list[str]]]:
    """Every table: rows of cells, without its rule."""
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [[table[0], *table[2:]] for table in found if table]


def table(text: str, words: str) -> list[list[str]]:
    """The body of the table whose head or first row has these words."""
    return next(found[1:] for found in tables(text) if any(words in cell for cell in (*found[0], *found[1])))


def blocks(text: str) -> list[str]:
    return re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def plain(text: str) -> str:
    return " ".join(text.split())


def words(cell: str) -> tuple[set[str], set[str]]:
    """What no language changes: code, and numbers."""
    return set(re.findall(r"`([^`]+)`", cell)), set(re.findall(r"\d[\d,.]*\d|\d", cell))


# -- the two languages -------------------------------------------------------------------------------------------------


def test_both_have_the_same_headings_blocks_and_tables() -> None:
    levels = [
        re.findall(r"^(#+) ", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M) for text in (ENGLISH, CHINESE)
    ]
    assert levels[0] == levels[1] and len(levels[0]) > 12
    assert blocks(ENGLISH) == blocks(CHINESE)
    for english, chinese in zip(tables(ENGLISH), tables(CHINESE), strict=True):
        for row, other in zip(english, chinese, strict=True):
            assert [words(cell) for cell in row] == [words(cell) for cell in other]


def test_both_have_the_same_numbers_code_and_links() -> None:
    for pattern in (r"`([^`\n]+)`", r"(?<![\w.])\d+(?:[.,]\d+)*(?![\w-])"):
        english, chinese = (set(re.findall(pattern, text)) for text in (ENGLISH, CHINESE))
        assert english == chinese, english ^ chinese
    links = [re.findall(r"\]\(([^)#]+)\)", text) for text in (ENGLISH, CHINESE)]
    assert sorted({*links[0]} - {"ascend.zh.md"}) == sorted({*links[1]} - {"ascend.md"})


@both
def test_links_lead_somewhere(text: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        assert not path or (ROOT / "docs" / path).is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", text, re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", one).lower().replace(" ", "-") for one in headings}


# -- tables of data ----------------------------------------------------------------------------------------------------


@both
def test_the_chips_are_those_of_the_table_of_limits(text: str) -> None:
    rows = table(text, "Atlas A2")
    assert len(rows) == len(limits.table()["chip"])
    for row, chip in zip(rows, limits.table()["chip"], strict=True):
        assert row[0].startswith(chip["series"])
        assert row[1].split(", ") == chip["names"] and row[2].split(", ") == chip["dtypes"]
        assert any(word in row[3] for word in ("refused", "拒绝")) is not chip["attention"]


@both
def test_the_sets_are_those_that_doctor_looks_up(text: str) -> None:
    rows = [[UNNAMED.get(cell, cell) for cell in row] for row in table(text, "torch-npu")]
    assert rows == [[one.torch, one.torch_npu, one.python, one.cann, one.state] for one in packages.sets()]


@both
def test_the_variables_are_those_that_are_checked(text: str) -> None:
    rows = table(text, "ASCEND_RT_VISIBLE_DEVICES")
    for row, variable in zip(rows, environment.variables(), strict=True):
        name, option, values, default, meaning = row
        assert name == f"`{variable.name}`" and meaning
        assert option == (f"`{variable.option}`" if variable.option else "")
        assert default == f"`{variable.default}`" or not variable.default
        known = {one.casefold() for one in variable.among}
        assert known <= {one.casefold() for one in words(values)[0]}, values
        ends = {str(end) for end in (variable.least, variable.most) if end is not None}
        assert not ends or words(values)[1] == ends, values


@both
def test_every_option_of_the_backend_is_named(text: str) -> None:
    for option in AscendDescriptor.options:
        assert f"`{option.name}`" in text
    excluded = environment.table()["allocator"]["excluded"]
    assert all(f"`{key}`" in text for key in (*excluded, "expandable_segments:True"))


# -- numbers and rules -------------------------------------------------------------------------------------------------


@both
def test_block_sizes(text: str) -> None:
    rows = table(text, "block size" if text is ENGLISH else "块大小")
    fast = [int(size) for size in rows[0][0].split(", ")]
    assert fast == [size for size in range(1, 600) if limits.pages_prompts(size)]
    assert words(rows[1][0])[1] == {"16", "512", "32"}
    multiple, least, most = limits.table()["attention"]["one_query"]["block_size"]["bf16"]
    assert (multiple, least, most, capabilities.PREFERRED) == (16, 16, 512, 32)
    assert f"**{capabilities.PREFERRED}**" in text and "**128" in text
    assert not limits.fits(24, [multiple, least, most])


def pool(block_size: int, context: int = 1 << 20) -> PoolSpec:
    layer = LayerSpec(index=0, q_heads=32, kv_heads=8, k_dim=128, v_dim=128, scale=1.0)
    group = GroupSpec(layers=(layer,), block_size=block_size, kv_dtype="bf16")
    return PoolSpec(groups=(group,), num_blocks=8, dtype="bf16", limits=Limits(rows=1, tokens=2048, context=context))


@both
def test_what_gathering_takes(text: str) -> None:
    assert f"{GATHERED:,}" in text
    nbytes = 2 * gathered(pool(32), 32) * 8 * 128 * 2  # keys and values, KV heads, dim, bytes
    assert f"{round(nbytes / 2**20)} MiB" in text


@both
def test_limits_that_are_named(text: str) -> None:
    most, cells = limits.table()["attention"], [row[1] for row in table(text, "float32")]
    named = {*most["head_dim"], most["heads"], most["ratio"]}
    assert any(words(cell)[1] == {str(number) for number in named} for cell in cells)
    lengths = {most["one_query"]["context"], most["batch"]}
    assert any(words(cell)[1] == {f"{number:,}" for number in lengths} for cell in cells)
    assert f"{most['elements']:,}" in text and f" {capabilities.MOST_GRAPHS} " in text


def test_what_is_refused_is_refused_with_the_guides_words() -> None:
    chip = limits.chip("910B3")
    assert chip is not None
    can = capabilities.declared(chip)
    assert plain(ENGLISH).count("no attention operator of torch-npu takes one") == 1
    assert "no attention operator of torch-npu takes a softcap" in capabilities.SOFTCAP
    assert not can.features & {"softcap", "alibi", "non_causal"} and {"window", "sinks"} <= can.features
    assert set(can.dtypes) == set(can.kv_dtypes) == {"bf16", "fp16"}
    assert can.graph_default is False and can.weight_formats == frozenset()


def test_the_log_says_once_which_block_size_is_fast(caplog: pytest.LogCaptureFixture) -> None:
    backend = double(runtime=HostRuntime())
    with caplog.at_level(logging.INFO, "pagedkv.backends.ascend"):
        for size in (32, 32, 128, 512):
            backend.alloc_pool(pool(size, 64)).close()
        backend.alloc_pool(dataclasses.replace(pool(48, 64), placement="host")).close()
    backend.close()
    assert [record.args for record in caplog.records] == [(32,)]
    assert "128 is the fast path" in caplog.text
    note = find_device("ascend-910b3").note
    assert "128" in note and "--block-size 128" in note, "and so does the plan"


def test_the_structure_names_every_module_of_the_backend_and_of_the_contract() -> None:
    text = (ROOT / "docs" / "structure.md").read_text("utf-8")
    backend = text[text.index("pagedkv_ascend/") : text.index("\nplugins/\n")]
    for path in (ROOT / "backends" / "pagedkv_ascend").iterdir():
        assert path.name == "__init__.py" or path.suffix not in (".py", ".toml") or path.name in backend, path.name
    helpers = [
        path.name for path in (ROOT / "pagedkv" / "api").glob("*.py") if path.name.startswith(("torch", "check"))
    ]
    assert len(helpers) == 6 and all(name in text for name in helpers)


@both
def test_every_line_that_is_named_is_one_that_is_said(text: str) -> None:
    folders = (ROOT / "backends" / "pagedkv_ascend", ROOT / "pagedkv" / "core")
    sources = "\n".join(path.read_text("utf-8") for folder in folders for path in folder.glob("*.py"))
    said = re.sub(r"""["']\s*\n\s*f?["']""", "", sources)
    lines = [row[0].strip("`") for row in table(text, "the line says" if text is ENGLISH else "提示中含有")]
    assert len(lines) == 13 and not [line for line in lines if line not in said]


# -- commands ----------------------------------------------------------------------------------------------------------


def commands(text: str) -> list[list[str]]:
    """Every command of pagedkv in a block, as words."""
    lines = [line for block in blocks(text) for line in block.splitlines() if line.startswith("pagedkv ")]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def test_the_commands_are_ones_that_pagedkv_knows() -> None:
    found = commands(ENGLISH)
    assert {one[0] for one in found} == {"doctor", "certify", "generate", "plan"}
    for name, *rest in found:
        known = CliRunner().invoke(cli.pagedkv, [name, "--help"]).output
        assert all(re.search(rf"(?<![\w-]){flag}(?![\w-])", known) for flag in rest if flag.startswith("--"))
        if "--device" in rest:
            assert find_device(rest[rest.index("--device") + 1]).backend == AscendDescriptor.name
    known = CliRunner().invoke(cli.pagedkv, ["generate", "--help"]).output
    assert all(flag in known for flag in ("--no-enforce-eager", "--backend-option", "--device", "--block-size"))


COMMAND = (
    "python -m pagedkv.entrypoints.api_server --model MODEL --tensor-parallel-size 2 --block-size 32 "
    "--use-ascend-memory-pool"
)


@both
def test_the_command_for_two_cards_is_marked_as_refused_as_long_as_it_is(text: str) -> None:
    assert any(block == COMMAND + "\n" for block in blocks(text))
    after = text[text.index(COMMAND) :]
    assert after.split("**", 2)[1].rstrip("。.") in ("Refused today", "目前会被拒绝")
    assert "`pagedkv serve`" in after and importlib.util.find_spec("pagedkv.entrypoints.api_server") is not None
    with pytest.raises(ConfigError) as caught:
        EngineConfig.of(model="demo", tensor_parallel_size=2, block_size=32, use_ascend_memory_pool=True)
    assert f"`{caught.value}`" in text


@both
def test_importing_pagedkv_decides_on_the_loading_of_extensions(text: str) -> None:
    name = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    assert pagedkv.__version__ and name in os.environ, "by the user, or by the import"
    assert f"`{name}=0`" in text


def test_the_target_that_asks_the_wheels_exists() -> None:
    assert "`make ascend-check`" in ENGLISH and re.search(
        r"^ascend-check:", (ROOT / "Makefile").read_text("utf-8"), re.M
    )
    for version in re.findall(r"torch-npu (2[\d.]+\d\.\w+), ([\d.]+) and ([\d.]+),", ENGLISH)[0]:
        assert (ROOT / "tests" / "backends" / "ascend" / "schemas" / f"{version}.txt").is_file()


def test_every_answer_that_is_named_is_one_that_the_script_writes() -> None:
    script = (ROOT / "ci" / "device" / "ascend.sh").read_text("utf-8")
    written = {f"{name}.json" for name in re.findall(r"^ +ask (\w+)", script, re.M)}
    written |= set(re.findall(r'"\$OUT/([\w.]+)"', script))
    written |= {f"same-{name}.json" for name in re.search(r"for name in (ascend .*); do", script)[1].split()}
    rows = table(ENGLISH, "answer in")
    named = {name for row in rows for name in re.findall(r"[\w-]+\.jsonl?", row[1])}
    assert named <= written and len(named) == 11
    assert "`LIMIT=3600`" in ENGLISH and "${LIMIT:-" in script
