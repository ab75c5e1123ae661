"""The template: small, complete, an installed distribution like any other, and right by a float64 oracle."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv import SamplingParams
from pagedkv.api import (
    AttentionBackend,
    ContractViolation,
    GroupSpec,
    Limits,
    OutOfDeviceMemory,
    UnsupportedError,
    World,
)
from tests.backends.cpu.rig import Rig, layer_spec, pool_spec
from tests.helpers.engine_rig import engine
from tests.helpers.wheels import build_wheel, install_wheel

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "plugins" / "template"
SOURCES = sorted((TEMPLATE / "pagedkv_template").rglob("*.py"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where pip installed the template's wheel."""
    home = tmp_path_factory.mktemp("template")
    return install_wheel(build_wheel(TEMPLATE, home / "wheels"), home / "site")


@pytest.fixture(scope="module")
def module(site: Path) -> Iterator[Any]:
    """The installed package."""
    sys.path.insert(0, str(site))
    yield importlib.import_module("pagedkv_template")
    sys.path.remove(str(site))
    for name in [name for name in sys.modules if name.split(".")[0] == "pagedkv_template"]:
        del sys.modules[name]


@pytest.fixture
def made(module: Any) -> Iterator[Any]:
    """An instance as the core creates it."""
    backend = module.TemplateDescriptor().create(0, {}, World())
    yield backend
    backend.close()


def run(site: Path, *arguments: str) -> str:
    """Standard output of a Python process that has the template installed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def listing(site: Path) -> dict[str, Any]:
    rows = json.loads(run(site, "-m", "pagedkv.cli.main", "backends", "--json"))
    return {row["name"]: row for row in rows}


def error(out: torch.Tensor, want: np.ndarray) -> float:
    return float(np.abs(out.double().numpy() - want).max())


# -- the source --------------------------------------------------------------------------------------------------------


def test_all_of_it_is_less_than_300_lines():
    assert len(SOURCES) > 1
    assert sum(len(path.read_text().splitlines()) for path in SOURCES) < 300


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_u80_it_imports_the_contract_numpy_and_the_standard_library(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules = [f"{node.module}.{a.name}" if node.module == "pagedkv" else str(node.module) for a in node.names]
        else:
            continue
        for name in modules:
            top = name.split(".")[0]
            assert name == "pagedkv.api" or top in {"numpy", "pagedkv_template"} | sys.stdlib_module_names, name
            assert name != "numpy" or path.name != "__init__.py"  # nor does listing the backends need it


def test_functions_are_small_and_nothing_is_asserted():
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    sizes = [
        node.end_lineno - node.lineno + 1 for node in nodes if isinstance(node, ast.FunctionDef) and node.end_lineno
    ]
    assert max(sizes) <= 25 and sorted(sizes)[len(sizes) // 2] < 10
    assert not any(isinstance(node, ast.Assert) for node in nodes)


# -- the distribution --------------------------------------------------------------------------------------------------


def test_it_depends_on_plain_pagedkv_and_numpy(site):
    (metadata,) = site.glob("pagedkv_template-*.dist-info/METADATA")
    message = Parser().parsestr(metadata.read_text())
    assert (message["Name"], message["Version"]) == ("pagedkv-template", "1.0.0")
    assert message.get_all("Requires-Dist") == ["pagedkv", "numpy"]


def test_neither_descriptor_nor_backend_loads_torch(site):
    code = """
import sys
from pagedkv_template import TemplateDescriptor
from pagedkv.api import World
descriptor = TemplateDescriptor()
(device,) = descriptor.probe()
assert "pagedkv_template.backend" not in sys.modules
assert descriptor.create(device.index, {}, World()).capabilities() == descriptor.describe(device)
print("torch" in sys.modules)
"""
    assert run(site, "-c", code).strip() == "False"


def test_it_is_listed_and_never_chosen_by_itself(site):
    row = listing(site)["template"]
    assert (row["distribution"], row["version"], row["api"]) == ("pagedkv-template", "1.0.0", "1.0")
    assert (row["status"], row["score"]) == ("ok", 0)
    (reason,) = row["reasons"]
    assert "only when chosen by name" in reason


def test_the_readme_renames_a_copy(tmp_path):
    """The README's own lines, up to pip, make a backend with another name."""
    copy = tmp_path / "pagedkv-mychip"
    shutil.copytree(TEMPLATE, copy, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    shown = (TEMPLATE / "README.md").read_text()
    (block,) = re.findall(r"```\ncp -r .*?cd pagedkv-mychip\n(.*?)pip install", shown, re.DOTALL)
    subprocess.run(["bash", "-ec", block], cwd=copy, check=True)
    assert "template" not in "".join(p.read_text().lower() for p in copy.rglob("*") if p.is_file())
    code = "from pagedkv_mychip import MyChipDescriptor as D; print(D.name, type(D().create(0, {}, None)).__name__)"
    assert run(copy, "-c", code).split() == ["mychip", "MyChipBackend"]
    project = (copy / "pyproject.toml").read_text()
    assert 'name = "pagedkv-mychip"' in project and 'mychip = "pagedkv_mychip:MyChipDescriptor"' in project


def greedy(family: str, **settings: Any) -> list[list[int]]:
    """Prompts longer than a step's budget, more of them than rows, one the beginning of another."""
    prompts = [list(range(2, 25)), [7, 8], list(range(2, 15)), [9] * 11]
    with engine(family, max_num_seqs=3, max_num_batched_tokens=16, num_blocks=40, **settings) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_model_says_the_same_as_on_the_cpu_backend(family):
    """Heads in groups; windows and softcap in the second."""
    wanted = greedy(family)
    assert greedy(family, backend="template", backend_options={}) == wanted
    assert [len(ids) for ids in wanted] == [12] * 4


# -- numbers -----------------------------------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 7},
    "softcap": {"softcap": 2.5},
    "sinks": {"sinks": True},
    "sinks of a window": {"sinks": True, "window": 3},
    "non causal": {"causal": False},
    "uneven groups": {"q_heads": 5, "kv_heads": 2},
    "one KV head": {"q_heads": 8, "kv_heads": 1},
    "odd dims": {"k_dim": 24, "v_dim": 7},
    "all at once": {"q_heads": 6, "kv_heads": 4, "window": 9, "softcap": 1.5, "sinks": True},
}


def bound(rig: Rig) -> dict[str, np.ndarray]:
    """Sinks for the rig's layer, where it takes them."""
    if not rig.layer.sinks:
        return {}
    params = {"sinks": np.linspace(-2, 3, rig.layer.q_heads, dtype=np.float32)}
    rig.backend.bind(rig.pool, rig.layer.index, params)
    return params


@pytest.mark.parametrize("kv_dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("name", SHAPES)
def test_a_mixed_batch_equals_float64(made, name, block_size, kv_dtype):
    """A decode, a prompt, a chunk and a prefix hit in one batch, over blocks whose old content is NaN."""
    rig = Rig(
        pool_spec(layer_spec(**SHAPES[name]), block_size=block_size, num_blocks=300, kv_dtype=kv_dtype), made=made
    )
    params = bound(rig)
    rig.poison(float("nan"))
    rows = [(rig.sequence(n), n, count) for n, count in ((40, 1), (33, 33), (50, 17), (16, 4), (1, 1))]
    for seq, context, count in rows:
        rig.write(seq, 0, context - count)
    out = rig.step(*rows)
    assert error(out, np.concatenate([rig.expected(*row, params) for row in rows])) < 2e-6


def test_half_precision_rounds_what_comes_out(made):
    rig = Rig(pool_spec(dtype="fp16", kv_dtype="fp16"), made=made)
    seq = rig.sequence(30)
    assert error(rig.step((seq, 30, 30)), rig.expected(seq, 30, 30)) < 1e-3


def test_a_row_has_the_same_bits_alone_in_company_in_chunks_and_in_other_blocks(made):
    """Attention alone has this, for every context around a block; the products around it are not this backend's."""
    assert "batch_invariant" not in made.capabilities().features
    rig = Rig(pool_spec(layer_spec(k_dim=20, v_dim=20), num_blocks=300), made=made)
    for length in (1, 2, 15, 16, 17, 31, 33, 100, 257):
        seq, other, third = rig.sequence(length), rig.sequence(64), rig.sequence(5)
        alone = rig.step((seq, length, length))
        rig.write(other, 0, 63)
        company = rig.step((other, 64, 1), (seq, length, length), (third, 5, 5))[1 : 1 + length]
        moved = type(seq)(seq.keys, seq.values, seq.queries, [rig.free.pop() for _ in seq.blocks])
        chunks = [rig.step((moved, end, end - start)) for start, end in _cuts(length, 7)]
        assert torch.equal(company, alone) and torch.equal(torch.cat(chunks), alone)
        rig.free += [*seq.blocks, *other.blocks, *third.blocks, *moved.blocks]


def _cuts(length: int, step: int) -> list[tuple[int, int]]:
    return [(start, min(length, start + step)) for start in range(0, length, step)]


def test_sinks_may_be_bound_again(made):
    rig = Rig(pool_spec(layer_spec(sinks=True)), made=made)
    seq = rig.sequence(9)
    with pytest.raises(ContractViolation, match="sinks"):
        rig.step((seq, 9, 9))
    for shift in (0.0, 4.0):
        params = {"sinks": np.linspace(-1, 1, 4, dtype=np.float32) + np.float32(shift)}
        made.bind(rig.pool, 0, params)
        assert error(rig.step((seq, 9, 9)), rig.expected(seq, 9, 9, params)) < 2e-6


def test_groups_of_other_shapes_share_the_ids(made):
    """Odd sizes, so that no layer lies on a boundary of its dtype by luck."""
    dims = {"k_dim": 3, "v_dim": 5}
    groups = (
        GroupSpec(layers=(layer_spec(1, **dims, kv_of=0), layer_spec(0, **dims)), block_size=3, kv_dtype="fp16"),
        GroupSpec(layers=(layer_spec(2, kv_heads=1, k_dim=7, v_dim=1),), block_size=5, kv_dtype="fp32"),
    )
    spec = pool_spec(groups=groups)
    first, second = Rig(spec, made=made), Rig(spec, made=made, group=1)
    second.pool, first.layer = first.pool, groups[0].layers[1]
    seq = first.sequence(14)
    assert error(first.step((seq, 14, 14)), first.expected(seq, 14, 14)) < 2e-6
    sharing = made.plan(first.pool, 0, first.batch([(seq, 14, 14)]))
    out = torch.empty(14, 4, 5)
    made.attend(sharing, 1, seq.queries, None, None, out)
    assert error(out, first.expected(seq, 14, 14)) < 2e-6
    taken = second.sequence(25)
    taken.blocks = seq.blocks
    assert error(second.step((taken, 25, 25)), second.expected(taken, 25, 25)) < 2e-6
    per_block = max(3 * 2 * (3 + 5) * 2, 5 * 1 * (7 + 1) * 4)
    assert made.pool_cost(spec).per_block == per_block


# -- laws that need this backend's own view ----------------------------------------------------------------------------


def test_the_cost_bounds_what_is_allocated(made):
    """Blocks exactly; plans and temporaries of the largest batch stay within `fixed`."""
    limits = Limits(rows=8, tokens=64, context=1024)
    for layer in layer_spec(softcap=3.0), layer_spec(q_heads=1, kv_heads=1, k_dim=1, v_dim=1):
        spec = pool_spec(layer, limits=limits, num_blocks=520, block_size=16, kv_dtype="fp16")
        cost = made.pool_cost(spec)
        assert cost.per_block == 16 * layer.kv_heads * (layer.k_dim + layer.v_dim) * 2
        rig = Rig(spec, made=made)
        rows = [(rig.sequence(1024), 1024, 8) for _ in range(8)]
        batch, (q, k, v) = rig.batch(rows), rig.tensors(rows)
        out = torch.empty(len(q), layer.q_heads, layer.v_dim)
        made.attend(made.plan(rig.pool, 0, batch), 0, q, k, v, out)  # what numpy keeps for itself is there by now
        tracemalloc.start()
        plans = [made.plan(rig.pool, 0, batch) for _ in range(limits.plans)]
        made.attend(plans[0], 0, q, k, v, out)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert 0 < peak <= cost.fixed
        rig.pool.close()


def test_u85_every_reason_is_given_at_once(made):
    layer = layer_spec(0, k_dim=2000, kind="mla", alibi=True, kv_of=5)
    spec = pool_spec(layer, block_size=0, kv_dtype="bf16", dtype="fp64", placement="host", features=frozenset({"lse"}))
    with pytest.raises(UnsupportedError) as caught:
        made.alloc_pool(spec)
    for word in ("block size 0", "2000", "'mla'", "'alibi'", "layer 0 5", "'bf16'", "'fp64'", "'host'", "'lse'"):
        assert sum(word in reason for reason in caught.value.reasons) >= 1, word
    assert len(caught.value.reasons) == 9
    with pytest.raises(UnsupportedError, match="kv_of of layer 1") as caught:
        made.pool_cost(pool_spec(layer_spec(0), layer_spec(1, kv_of=0, k_dim=8)))
    assert len(caught.value.reasons) == 1


def test_a_pool_that_cannot_fit_says_how_much(made):
    spec = pool_spec(num_blocks=1 << 45)
    with pytest.raises(OutOfDeviceMemory, match="fewer blocks") as caught:
        made.alloc_pool(spec)
    cost = made.pool_cost(spec)
    assert caught.value.requested == (1 << 45) * cost.per_block + cost.fixed
    assert made.alloc_pool(pool_spec()).num_blocks == 64


def test_the_null_block_is_never_written(made):
    rig = Rig(pool_spec(), made=made)
    for slot in (0, 15, 64 * 16, -2):
        with pytest.raises(ContractViolation, match="slot") as caught:
            rig.append_plan(np.array([16, slot], np.int64))
        assert caught.value.law == "slots"


# -- the guide ---------------------------------------------------------------------------------------------------------

GUIDE = (ROOT / "docs" / "backend-guide.md").read_text()


def table(heading: str) -> list[str]:
    """The first column of the guide's table that has this first heading."""
    (rows,) = re.findall(rf"^\| {heading} \|.*\n\| ---.*\n((?:\|.*\n?)+)", GUIDE, re.MULTILINE)
    return [row.split("|")[1].strip() for row in rows.splitlines()]


def test_the_guide_explains_the_six_required_methods():
    assert {name.strip("`") for name in table("method")} == set(AttentionBackend.__abstractmethods__)


def test_the_guide_names_sections_that_the_kit_has():
    named = set(re.findall(r"`(test_\w+)`", GUIDE))
    assert len(named) > 10 and named <= {path.stem for path in (ROOT / "pagedkv" / "conformance").glob("test_*.py")}


def test_every_message_in_the_guide_is_one_that_pagedkv_gives():
    sources = "\n".join(path.read_text() for path in (ROOT / "pagedkv").rglob("*.py"))
    said = re.sub(r'["\']\s*\n\s*f?["\']', "", sources).replace("{key!r}", "'probe'").replace("{m}", "plan")
    for message in table("the message says"):
        assert message.strip("`") in said, message


def test_the_guides_links_lead_somewhere():
    headings = {
        re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"^#+ (.*)$", GUIDE, re.M)
    }
    for target in re.findall(r"\]\(([^)]+)\)", GUIDE):
        assert target[1:] in headings if target.startswith("#") else (ROOT / "docs" / target).is_file(), target


def test_guide_and_readme_copy_the_template_in_the_same_way():
    lines = [line.split("  ")[0] for line in (TEMPLATE / "README.md").read_text().splitlines()]
    for line in GUIDE.split("```\n")[1].splitlines():
        assert line in lines
