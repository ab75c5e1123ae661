"""What a torch-npu that was imported over stub libraries says of what the Ascend backend asks of it: JSON.

    probe.py FIXTURE          with the wheel and the backends on PYTHONPATH, the stubs on LD_LIBRARY_PATH

Prints {"checked": {what: how many}, "wrong": [lines]}. Shapes are those of the wheel's own meta functions, for the very
calls that the backend makes; no number is computed.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch_npu
from torch._subclasses.fake_tensor import FakeTensorMode

from pagedkv_ascend import ops
from pagedkv_ascend.operators import V1, V2, Call, Operators

ROOT = Path(__file__).resolve().parents[2]
DEVICE_CODE = (
    "backends/pagedkv_ascend/runtime.py",
    "backends/pagedkv_ascend/opening.py",
    "pagedkv/api/torch_streams.py",
)
METHODS = {
    "ExternalEvent": ("wait", "reset", "record"),
    "NPUGraph": ("replay", "reset"),
    "Stream": ("wait_stream", "wait_event", "record_event"),
    "Event": ("query", "synchronize", "record"),
}
"""What is called on objects of torch.npu."""
NO_LSE = ((0,), torch.float32)
"""What the wheel's own shape functions say where no log-sum-exp is asked for. The documents say a zero of shape [1]."""


class Checks:
    """What was looked at, and what was not as it should be."""

    def __init__(self) -> None:
        self.checked: dict[str, int] = {}
        self.wrong: list[str] = []

    def that(self, what: str, true: bool, line: str) -> None:
        self.checked[what] = self.checked.get(what, 0) + 1
        if not true:
            self.wrong.append(f"{what}: {line}")

    def runs(self, what: str, call: Callable[[], object]) -> None:
        """A call that is not refused."""
        try:
            call()
        except (RuntimeError, NotImplementedError, TypeError) as error:
            self.that(what, False, str(error))
        else:
            self.that(what, True, "")

    def shapes(self, what: str, call: Callable[[], Sequence[torch.Tensor]], *wanted: tuple[Any, ...]) -> None:
        """A call whose results have these shapes and dtypes."""
        try:
            found = [(tuple(tensor.shape), tensor.dtype) for tensor in call()]
        except (RuntimeError, NotImplementedError, TypeError) as error:
            self.that(what, False, str(error))
        else:
            self.that(what, found == list(wanted), f"{found}, not {list(wanted)}")


# -- schemas and names -------------------------------------------------------------------------------------------------


def check_schemas(checks: Checks, fixture: Path) -> None:
    """Every line of the fixture is registered so."""
    for line in fixture.read_text("utf-8").splitlines():
        if line.startswith("#"):
            continue
        wanted = torch._C.parse_schema(line)
        found = torch._C._jit_get_schemas_for_operator(wanted.name)
        checks.that("schemas", any(str(one) == str(wanted) for one in found), f"{line}: {found}")


def names_used() -> Iterator[str]:
    """Attributes of torch.npu that the backend reads, in its own code and in what the contract's package shares."""
    for path in DEVICE_CODE:
        for node in ast.walk(ast.parse((ROOT / path).read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self._module", "module", "npu"):
                yield node.attr


def check_names(checks: Checks) -> None:
    for name in sorted({*names_used(), *METHODS}):
        checks.that("torch.npu names", hasattr(torch.npu, name), name)
    for name, methods in METHODS.items():
        for method in methods:
            checks.that("torch.npu names", hasattr(getattr(torch.npu, name, None), method), f"{name}.{method}")


# -- shapes ------------------------------------------------------------------------------------------------------------


def attention_calls(device: str) -> Iterator[tuple[str, Call]]:
    """One of each kind of call: several rows of one query, and a row of several, paged, fresh and banded."""

    def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    one: dict[str, Any] = {"query": zeros(3, 1, 8, 64), "kv_heads": 2, "scale": 0.125, "kv_lengths": [5, 33, 64]}
    table = zeros(3, 2, dtype=torch.int32)
    cache, mask = zeros(10, 32, 128), zeros(3, 64, dtype=torch.int8)
    yield "decode", Call(**one, key=cache, value=cache, table=table, block_size=32)
    yield "decode", Call(**one, key=cache, value=cache, table=table, block_size=32, mask=mask, lse=True)
    several: dict[str, Any] = {"query": zeros(1, 7, 8, 64), "kv_heads": 2, "scale": 0.125}
    several["mask"] = zeros(2048, 2048, dtype=torch.int8)
    wide, fresh = zeros(4, 128, 128), zeros(1, 7, 128)
    paged: dict[str, Any] = {"table": zeros(1, 2, dtype=torch.int32), "block_size": 128, "kv_lengths": [200]}
    band: dict[str, Any] = {"sparse_mode": 4, "pre_tokens": 3, "next_tokens": 0}
    yield "prefill", Call(**several, **paged, key=wide, value=wide, sparse_mode=3, lse=True)
    yield "prefill", Call(**several, **paged, **band, key=wide, value=wide)
    yield "prefill", Call(**several, key=fresh, value=fresh, kv_lengths=[7], sparse_mode=3)
    yield "prefill", Call(**several, **band, key=fresh, value=fresh, kv_lengths=[7], lse=True)


def check_attention(checks: Checks, device: str) -> None:
    """Both versions, through the backend's own calls."""
    for names in (V1, V2):
        operators = Operators()
        operators.names, operators._attention = names, getattr(torch.ops.npu, names["op"])
        for what, call in attention_calls(device):
            kind = f"{what} {'v1' if names is V1 else 'v2'} on {device}"
            batch, tokens, heads, _ = call.query.shape
            lse = ((batch, heads, tokens, 1), torch.float32) if call.lse else NO_LSE
            checks.shapes(kind, partial(operators.attention, call), (tuple(call.query.shape), call.query.dtype), lse)


def check_others(checks: Checks, device: str) -> None:
    """Append and the fused ops."""

    def half(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16, device=device)

    rows, caches = half(5, 2, 64), half(10, 32, 2, 64)
    slots = torch.zeros(5, dtype=torch.int32, device=device)
    checks.runs(f"append on {device}", lambda: Operators().append(rows, rows, caches, caches, slots))
    kept = ((5, 64), torch.bfloat16)
    checks.shapes(f"rms_norm on {device}", lambda: [ops.rms_norm(half(5, 64), half(64), 1e-6)], kept)
    checks.shapes(f"silu_mul on {device}", lambda: [ops.silu_mul(half(5, 128))], kept)


def check_rope(checks: Checks) -> None:
    """On the meta device alone: for a fake tensor the wheel asks which device is current, and there is none."""
    rows, angles = torch.zeros(5, 2, 64, dtype=torch.bfloat16, device="meta"), torch.zeros(5, 32, device="meta")
    wide = torch.zeros(1, 5, 1, 64, dtype=torch.bfloat16, device="meta")
    turned = ((1, 5, 2, 64), torch.bfloat16)
    checks.shapes("rope on meta", lambda: [torch.ops.npu.npu_rotary_mul(rows[None], wide, wide)], turned)
    checks.runs("rope on meta", lambda: ops.rope(rows, rows, angles, angles))


def main(fixture: Path) -> None:
    checks = Checks()
    checks.that("version", fixture.stem == torch_npu.__version__.split("+")[0], f"{torch_npu.__version__}")
    check_schemas(checks, fixture)
    check_names(checks)
    check_attention(checks, "meta")
    check_others(checks, "meta")
    check_rope(checks)
    with FakeTensorMode():
        check_attention(checks, "npu:0")
        check_others(checks, "npu:0")
    print(json.dumps({"checked": checks.checked, "wrong": checks.wrong}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
