"""What happens before an instance exists: import, probe, describe, options, create."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagedkv import plugins
from pagedkv.api import API_VERSION, Capabilities
from pagedkv.api.errors import ConfigError
from pagedkv.checking.capabilities import exceeds
from pagedkv.conformance.kit import Kit
from pagedkv.conformance.refusals import refuses
from pagedkv.conformance.subject import Subject
from pagedkv.plugins.checks import capability_problems

pytestmark = pytest.mark.level("core")

LIMIT_MS = 2000.0
"""Milliseconds after which the core stops waiting for a plugin; the aim is 100."""

DTYPES = {"fp32", "bf16", "fp16"}
COLLECTIVES = {"all_reduce", "all_gather", "broadcast", "barrier"}
GRAPHS = {"none", "decode", "uniform", "any"}
PATTERN_KEYS = {"dtype", "kv_dtype", "block_size", "head_dim", "group", "kind", "feature"}


# -- in a process of its own -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(subject: Subject) -> dict[str, Any]:
    """What `loading_child` saw of this plugin in a fresh interpreter."""
    command = [sys.executable, str(Path(__file__).with_name("loading_child.py"))]
    asked = {"target": plugins.find(subject.name).target, "path": sys.path}
    done = subprocess.run([*command, json.dumps(asked)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"the plugin's import or probe() ended the process: {done.stderr[-2000:]}"
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.law("loading: the descriptor's module imports only the standard library, numpy and pagedkv.api")
def test_import_is_light(kit: Kit, loaded: dict[str, Any]) -> None:
    kit.report("import_ms", loaded["import_ms"])
    foreign = loaded["imported"]
    assert not foreign, f"importing it loads {foreign}: import them in create(), or where they are first used"
    assert loaded["import_ms"] < LIMIT_MS, f"the import takes {loaded['import_ms']:.0f} ms, the core waits {LIMIT_MS}"


@pytest.mark.law("loading: probe() loads no framework, and answers in time")
def test_probe_is_light(kit: Kit, loaded: dict[str, Any]) -> None:
    kit.report("probe_ms", loaded["probe_ms"])
    assert not loaded["raised"], f"probe() raised {loaded['raised']}: return no device, or score 0 with the reason"
    assert not loaded["frameworks"], f"probe() or describe() loads {loaded['frameworks']}: ask the driver's own library"
    assert loaded["probe_ms"] < LIMIT_MS, f"probe() takes {loaded['probe_ms']:.0f} ms, the core waits {LIMIT_MS}"


@pytest.mark.law("loading: probe() opens no device")
def test_probe_opens_no_device(loaded: dict[str, Any]) -> None:
    if not Path("/proc/self/maps").exists():
        pytest.skip("only Linux shows which device files a process has open")
    opened = loaded["devices"]
    assert not opened, f"probe() or describe() opens {opened}: a context there takes memory in every process that looks"


@pytest.mark.law("loading: probe() gives the same devices each time, and changes nothing around it")
def test_probe_twice(loaded: dict[str, Any]) -> None:
    first, second = loaded["indices"]
    assert first == second, f"device indices {first}, then {second}: an index means the same device at every call"
    assert len(set(first)) == len(first), f"two devices share an index: {first}"
    assert not loaded["environment"], f"importing or probing changed the variables {loaded['environment']}"


# -- the descriptor ----------------------------------------------------------------------------------------------------


@pytest.mark.law("loading: the descriptor's name is the entry point's")
def test_name(subject: Subject) -> None:
    found = plugins.find(subject.name)
    assert subject.descriptor.name == found.name == subject.name, "descriptor, entry point and lookup differ"
    assert subject.name == subject.name.lower(), "names are lower case"


@pytest.mark.law("loading: describe() is pure")
def test_describe_is_pure(subject: Subject) -> None:
    first, second = (subject.descriptor.describe(subject.device) for _ in range(2))
    assert first == second, "describe() of one device gave two answers"


@pytest.mark.law("loading: an unknown or ill-typed option is refused before create()")
def test_options(subject: Subject) -> None:
    descriptor = subject.descriptor
    with refuses(ConfigError, "an option that no backend has", "no_such_option"):
        plugins.check_options(descriptor, {"no_such_option": 1})
    for option in descriptor.options:
        with refuses(ConfigError, f"option {option.name}=object()", option.name):
            plugins.check_options(descriptor, {option.name: object()})
        assert option.help, f"option {option.name} has no help: `pagedkv backends` and every error show it"
    assert set(plugins.check_options(descriptor, {})) == {option.name for option in descriptor.options}


# -- capabilities ------------------------------------------------------------------------------------------------------


@pytest.mark.law("loading: capabilities() is pure, and at most what describe() offered")
def test_capabilities_within_offer(kit: Kit, subject: Subject) -> None:
    assert kit.backend.capabilities() == kit.can, "capabilities() of one instance gave two answers"
    more = exceeds(kit.can, subject.offered)
    assert not more, f"the instance declares more than describe() did: {'; '.join(more)}"


@pytest.mark.law("loading: declared values are words and sizes that mean something")
def test_capabilities_are_sane(kit: Kit, subject: Subject) -> None:
    problems = capability_problems(kit.can) + capability_problems(subject.offered)
    if tuple(subject.descriptor.api) <= API_VERSION:  # a later contract may know words that this one does not
        problems += _unknown_words(kit.can)
    problems += _contradictions(kit.can)
    assert not problems, "; ".join(problems)


def _unknown_words(can: Capabilities) -> list[str]:
    words = {
        "dtypes": set(can.dtypes) - DTYPES,
        "native_dtypes": set(can.native_dtypes) - set(can.dtypes),
        "kv_dtypes": {name for name in can.kv_dtypes if not re.fullmatch(r"[a-z0-9_]+(/[a-z0-9_]+)?", name)},
        "features": {name for name in can.features if not re.fullmatch(r"[a-z][a-z0-9_]*", name)},
        "placements": can.placements - {"device", "host"},
        "collectives": can.collectives - COLLECTIVES,
        "graph": {can.graph} - GRAPHS,
        "exclusions": {key for pattern, _ in can.exclusions for key in pattern} - PATTERN_KEYS,
    }
    return [
        f"{field}: {sorted(unknown)} is nothing that a core asks for" for field, unknown in words.items() if unknown
    ]


def _contradictions(can: Capabilities) -> list[str]:
    rules = [
        (bool(can.dtypes and can.kv_dtypes), "it declares no dtype or no KV dtype"),
        ("device" in can.placements, "placements lacks 'device', where attention runs"),
        (("graph" in can.extensions) == (can.graph != "none"), "graph level and extension 'graph' come together"),
        (bool(can.head_dims and can.kinds), "it declares no head dim or no kind"),
    ]
    return [problem for holds, problem in rules if not holds]


# -- create ------------------------------------------------------------------------------------------------------------


@pytest.mark.law("loading: create() gives independent instances")
def test_two_instances(kit: Kit) -> None:
    first, second = kit.create(), kit.create()
    assert first is not second, "create() gave one instance twice"
    one, two = kit.rig(backend=first), kit.rig(backend=second)
    seq = two.sequence(2 * two.block_size)
    two.write(seq, 0, seq.length - 1)
    one.write(one.sequence(2 * one.block_size), 0, 2 * one.block_size)
    first.close()
    kit.check(two, two.step((seq, seq.length, 1)), two.expected((seq, seq.length, 1)))
