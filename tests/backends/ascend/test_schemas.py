"""Every call that the Ascend backend makes, against the schemas in the wheels of three versions of torch-npu.

The backend runs batches that reach each of its branches, its operators emulated; the fixtures, of which `ci/ascend.py`
says where they come from, tell what names and types each version takes.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pagedkv.api import OpSpec
from pagedkv.api.extensions import GraphShape
from pagedkv_ascend import attention
from pagedkv_ascend.backend import AscendBackend
from pagedkv_ascend.operators import V1, V2, Operators
from tests.backends.ascend.double import double
from tests.backends.ascend.emulation import operators
from tests.backends.ascend.pools import layer, spec
from tests.backends.ascend.sequences import Sequences

VERSIONS = ("2.10.0.post4", "2.13.0", "2.14.0")
OLDER = (V2["op"], "npu_scatter_pa_kv_cache")
"""Operators without which the backend takes the older ones."""
TYPES: dict[str, type | tuple[type, ...]] = {
    "Tensor": torch.Tensor,
    "int": int,
    "SymInt": int,
    "float": (float, int),
    "bool": bool,
    "str": str,
}
CALLED = {
    "npu::npu_rms_norm",
    "npu::npu_rotary_mul",
    "npu::npu_swiglu",
    "npu::npu_scatter_pa_kv_cache",
    "atb::_npu_reshape_and_cache",
    *(f"npu::{names['op']}{overload}" for names in (V1, V2) for overload in ("", ".out")),
    *(f"npu::{names['workspace']}" for names in (V1, V2)),
}
"""What the backend calls, all of it."""


# -- what is called ----------------------------------------------------------------------------------------------------


@dataclass
class Called:
    """One call, as it was written."""

    name: str
    args: tuple[Any, ...]
    named: dict[str, Any]


def listen(patch: pytest.MonkeyPatch, calls: list[Called]) -> None:
    """Keep every call of a vendor's operator as it is written, whether of its own or of its form with `out`."""
    packet, overload = torch._ops.OpOverloadPacket.__call__, torch._ops.OpOverload.__call__

    def whole(self: Any, /, *args: Any, **named: Any) -> Any:
        if self._qualified_op_name.startswith(("npu::", "atb::")):
            calls.append(Called(self._qualified_op_name, args, named))
        return packet(self, *args, **named)

    def part(self: Any, /, *args: Any, **named: Any) -> Any:
        if self.namespace in ("npu", "atb") and self._overloadname != "default":
            calls.append(Called(self.name(), args, named))
        return overload(self, *args, **named)

    patch.setattr(torch._ops.OpOverloadPacket, "__call__", whole)
    patch.setattr(torch._ops.OpOverload, "__call__", part)


def run_sequences(size: int, **changes: Any) -> None:
    """Fresh prompts, prompts behind cached tokens, and decode, checked against float64."""
    rows = Sequences(double(), spec(layer(**changes), block_size=size), [40, 6])
    rows.check(rows.step([0, 0], [34, 2]), [0, 0])
    rows.check(rows.step([34, 2], [5, 1]), [34, 2])
    rows.check(rows.step([39, 3], [1, 1]), [39, 3])


def run_pieces(patch: pytest.MonkeyPatch) -> None:
    """A context that is gathered a block at a time."""
    with patch.context() as small:
        small.setattr(attention, "gathered", lambda spec, block_size: block_size)
        run_sequences(32)


def record(backend: AscendBackend, **changes: Any) -> None:
    """A recorded step of one token a row, with sinks where the layer has them."""
    one, graphs = layer(**changes), backend.extension("graph")
    pool = backend.alloc_pool(spec(one))
    if one.sinks:
        backend.bind(pool, 0, {"sinks": [0.0] * 4})
    plan = graphs.static_plan(pool, 0, GraphShape(rows=2, tokens=2, max_ctx=64))
    q, k, v = (torch.zeros(2, heads, 32, dtype=torch.float16) for heads in (4, 2, 2))
    out = torch.empty_like(q)
    graphs.capture(lambda: backend.attend(plan, 0, q, k, v, out), [plan]).replay()


def run_ops(backend: AscendBackend) -> None:
    x, weight = torch.ones(3, 64).half(), torch.ones(32).half()
    norm = backend.op("rms_norm", OpSpec(dtype="fp16", dims={"hidden": 32}))
    add_norm = backend.op("add_rms_norm", OpSpec(dtype="fp16", dims={"hidden": 32}))
    silu_mul = backend.op("silu_mul", OpSpec(dtype="fp16", dims={"intermediate": 32}))
    rope = backend.op("rope", OpSpec(dtype="fp16", dims={"q_heads": 2, "kv_heads": 1, "rotary_dim": 16}))
    assert norm and add_norm and silu_mul and rope
    norm(x[:, :32], weight, 1e-6)
    add_norm(x[:, :32], torch.ones(3, 32).half(), weight, 1e-6)
    silu_mul(x)
    rope(torch.ones(3, 2, 32).half(), torch.ones(3, 1, 32).half(), torch.ones(3, 8), torch.zeros(3, 8))


@pytest.fixture(scope="module")
def calls() -> list[Called]:
    """Every call of batches that reach every branch, with the newer operators and with the older ones."""
    found: list[Called] = []
    operators.install()
    with pytest.MonkeyPatch.context() as patch:
        listen(patch, found)
        for older in (False, True):
            with operators.without(*OLDER) if older else nullcontext():
                run_pieces(patch)
                for window in (None, 5):
                    run_sequences(32, window=window)
                    run_sequences(128, window=window)
                    record(double(), window=window, sinks=window is None)
                run_ops(double())
    return found


# -- against the schemas -----------------------------------------------------------------------------------------------


def fits(value: Any, wanted: str) -> bool:
    """Whether a value is of a schema's type."""
    if wanted.startswith("Optional["):
        return value is None or fits(value, wanted[9:-1])
    if wanted.startswith("List["):
        return isinstance(value, (list, tuple)) and all(fits(one, wanted[5:-1]) for one in value)
    return isinstance(value, TYPES[wanted]) and (wanted == "bool" or not isinstance(value, bool))


def mistakes(call: Called, schema: Any) -> list[str]:
    """What a schema does not take of a call."""
    arguments = {argument.name: argument for argument in schema.arguments}
    places = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    given = dict(zip(places, call.args, strict=False)) | call.named
    found = [
        f"{name} is missing" for name, one in arguments.items() if name not in given and not one.has_default_value()
    ]
    if len(call.args) > len(places) or set(places[: len(call.args)]) & set(call.named):
        found.append(f"{len(call.args)} arguments by place")
    for name, value in given.items():
        if name not in arguments:
            found.append(f"{name} is unknown")
        elif not fits(value, str(arguments[name].type)):
            found.append(f"{name} is no {arguments[name].type}: {value!r}")
    return found


def parsed(version: str) -> dict[str, Any]:
    """The schemas of a version by name and overload."""
    made = (torch._C.parse_schema(line) for line in operators.schemas(version))
    return {schema.name + (f".{schema.overload_name}" if schema.overload_name else ""): schema for schema in made}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_call_is_one_that_the_version_takes(version: str, calls: list[Called]) -> None:
    schemas = parsed(version)
    assert {call.name for call in calls} == CALLED
    assert [f"{call.name}: {found}" for call in calls for found in mistakes(call, schemas[call.name])] == []


def test_the_batches_reach_every_form_of_attention(calls: list[Called]) -> None:
    """Paged and not, each sparse mode in use, one query and several, both kinds of mask, log-sum-exp or not."""
    for names in (V1, V2):
        named = [call.named for call in calls if call.name == f"npu::{names['op']}"]
        forms = {
            (one["block_size"], one["sparse_mode"], max(one[names["q_lengths"]]) > 1, one["atten_mask"] is not None)
            for one in named
        }
        assert {(32, 0, False, False), (32, 0, False, True), (128, 0, False, False)} <= forms, "decode"
        assert {(128, 3, True, True), (128, 4, True, True), (0, 3, True, True), (0, 4, True, True)} <= forms, "prompts"
        assert (0, 0, True, False) in forms, "a piece of a context that is seen whole"
        assert {one[names["lse"]] for one in named} == {False, True}


WRONG = {
    "unknown": ({"softmax_scale": 1.0}, "softmax_scale is unknown"),
    "type": ({"sparse_mode": "3"}, "sparse_mode is no int"),
    "lengths": ({"actual_seq_lengths": torch.ones(1)}, "actual_seq_lengths is no Optional"),
    "flag": ({"softmax_lse_flag": 1}, "softmax_lse_flag is no bool"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_call_that_a_schema_does_not_take_is_told(wrong: str) -> None:
    named, said = WRONG[wrong]
    tensors, schema = (torch.ones(1),) * 3, parsed("2.13.0")[f"npu::{V1['op']}"]
    assert mistakes(Called(schema.name, tensors, {}), schema) == []
    assert [line.startswith(said) for line in mistakes(Called(schema.name, tensors, named), schema)] == [True]


def test_arguments_by_place_and_those_without_a_default_are_told() -> None:
    schema = parsed("2.14.0")[f"npu::{V1['op']}"]
    one = torch.ones(1)
    assert mistakes(Called(schema.name, (one, one), {}), schema) == ["value is missing"]
    assert mistakes(Called(schema.name, (one, one, one, one), {}), schema) == ["4 arguments by place"]


# -- the emulation -----------------------------------------------------------------------------------------------------


def test_the_emulation_is_registered_under_the_texts_of_the_wheel() -> None:
    operators.install()
    schemas = parsed(operators.VERSION)
    for name, overload in operators.FUNCTIONS:
        registered = {one.overload_name: str(one) for one in torch._C._jit_get_schemas_for_operator(name)}
        assert registered[overload] == str(schemas[name + (f".{overload}" if overload else "")])


def test_fixtures_name_their_version_and_are_sorted() -> None:
    for version in VERSIONS:
        lines = (operators.SCHEMAS / f"{version}.txt").read_text("utf-8").splitlines()
        assert lines[0].startswith(f"# torch-npu {version}:")
        assert lines[1:] == sorted(lines[1:]) and parsed(version).keys() >= CALLED


def test_older_operators_are_taken_where_newer_ones_are_missing() -> None:
    operators.install()
    with operators.without(*OLDER):
        assert Operators().names is V1
    assert Operators().names is V2
