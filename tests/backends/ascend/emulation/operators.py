"""torch-npu's operators on the processor, in float32, under their real schemas: emulation.

For tests of whoever calls them: layouts, lengths, slots and every limit of the vendor's documents, never Ascend's own
numbers. Written from the schemas (`schemas/`) and those documents alone; imports nothing of what it tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.backends.ascend.emulation import cache, fused
from tests.backends.ascend.emulation.attention import Result, attend
from tests.backends.ascend.emulation.rules import Call, check, need

SCHEMAS = Path(__file__).resolve().parents[1] / "schemas"
VERSION = "2.13.0"

_BOTH = {
    "query": "query",
    "key": "key",
    "value": "value",
    "atten_mask": "mask",
    "block_table": "table",
    "block_size": "block_size",
    "num_key_value_heads": "kv_heads",
    "input_layout": "layout",
    "sparse_mode": "sparse_mode",
    "pre_tokens": "pre_tokens",
    "next_tokens": "next_tokens",
    "inner_precise": "inner_precise",
}
NAMES: Mapping[int, Mapping[str, str]] = {
    1: {
        **_BOTH,
        "num_heads": "heads",
        "scale": "scale",
        "actual_seq_lengths": "q_lengths",
        "actual_seq_lengths_kv": "kv_lengths",
        "softmax_lse_flag": "lse",
    },
    2: {
        **_BOTH,
        "num_query_heads": "heads",
        "softmax_scale": "scale",
        "actual_seq_qlen": "q_lengths",
        "actual_seq_kvlen": "kv_lengths",
        "return_softmax_lse": "lse",
    },
}
"""Arguments of each version that are emulated; a value for any other is refused."""


@dataclass
class Options:
    """What tests change. `inclusive`: sparse mode 4 sees keys >= query - pre_tokens, as the documents say; else the
    query's own counts as one of them. `fail_after`: calls that pass before every further one raises `failure`.
    """

    inclusive: bool = True
    fail_after: int | None = None
    failure: str = "NPU function error: aclrtSynchronizeStream, error code is 507015"


options = Options()
_installed: list[torch.library.Library] = []


@contextmanager
def emulated(**changes: Any) -> Iterator[Options]:
    """Other options for a while."""
    before = replace(options)
    try:
        for name, value in changes.items():
            setattr(options, name, value)
        yield options
    finally:
        options.__dict__.update(before.__dict__)


def install(version: str = VERSION) -> None:
    """Register the operators, once in a process."""
    if _installed:
        return
    libraries = {name: torch.library.Library(name, "FRAGMENT") for name in ("npu", "atb")}
    for text in schemas(version):
        schema = torch._C.parse_schema(text)
        function = FUNCTIONS.get((schema.name, schema.overload_name))
        if function is None:
            continue
        namespace, text = text.split("::", 1)
        libraries[namespace].define(text)
        libraries[namespace].impl(text.split("(", 1)[0], _checked(schema, function), "CPU")
    _installed.extend(libraries.values())


def schemas(version: str) -> list[str]:
    """The lines of a fixture."""
    lines = (SCHEMAS / f"{version}.txt").read_text("utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


@contextmanager
def without(*names: str) -> Iterator[None]:
    """torch.ops as a version without some of these operators has it."""
    real = {name: getattr(torch.ops, name) for name in ("npu", "atb")}
    try:
        for name, namespace in real.items():
            setattr(torch.ops, name, _Without(namespace, names))
        yield
    finally:
        for name, namespace in real.items():
            setattr(torch.ops, name, namespace)


class _Without:
    """A namespace of torch.ops less some operators."""

    def __init__(self, namespace: Any, names: tuple[str, ...]) -> None:
        self._namespace, self._names = namespace, names

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            raise AttributeError(name)
        return getattr(self._namespace, name)


def _checked(schema: Any, function: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """The operator as torch calls it: every argument by name, with its default."""
    names = [argument.name for argument in schema.arguments]
    defaults = {argument.name: argument.default_value for argument in schema.arguments}

    def operator(*args: Any, **given: Any) -> Any:
        if options.fail_after is not None:
            options.fail_after -= 1
            if options.fail_after < 0:
                raise RuntimeError(options.failure)
        return function({**defaults, **dict(zip(names, args, strict=False)), **given})

    return operator


# -- attention ---------------------------------------------------------------------------------------------------------


def _call(version: int, given: Mapping[str, Any]) -> Call:
    """The call, refused where a rule of the documents is broken."""
    names = NAMES[version]
    for name, value in given.items():
        known = name in names or name in ("workspace", "out")
        unused = value is None or (not isinstance(value, torch.Tensor) and value == 0)
        need(known or unused, f"{name} is documented, but not emulated")
    call = Call(version=version, **{mine: given[its] for its, mine in names.items()})
    call = replace(call, kv_heads=call.kv_heads or call.heads)
    check(call)
    return call


def _attention(version: int) -> Callable[[dict[str, Any]], Result]:
    return lambda given: attend(_call(version, given), options.inclusive)


def _workspace_bytes(call: Call) -> int:
    """Some number that depends on shapes alone, as lengths may change between replays."""
    return 512 + 4 * call.query.numel() + 16 * call.batch * call.heads


def _workspace(version: int) -> Callable[[dict[str, Any]], torch.Tensor]:
    return lambda given: torch.empty(_workspace_bytes(_call(version, given)), dtype=torch.uint8)


def _into(version: int) -> Callable[[dict[str, Any]], Result]:
    """The form that writes to memory of the caller's."""

    def attention(given: dict[str, Any]) -> Result:
        call, out, workspace = _call(version, given), given["out"], given["workspace"]
        need(len(out) == 2, f"{len(out)} tensors for result and log-sum-exp")
        if workspace is not None:
            need(workspace.nbytes >= _workspace_bytes(call), f"a workspace of {workspace.nbytes} bytes is too small")
        for target, made in zip(out, attend(call, options.inclusive), strict=True):
            need(target.shape == made.shape and target.dtype == made.dtype, f"out {tuple(target.shape)} {target.dtype}")
            need(target.is_contiguous(), "out is not contiguous")
            target.copy_(made)
        return out[0], out[1]

    return attention


FUNCTIONS: Mapping[tuple[str, str], Callable[[dict[str, Any]], Any]] = {
    ("npu::npu_fused_infer_attention_score", ""): _attention(1),
    ("npu::npu_fused_infer_attention_score", "out"): _into(1),
    ("npu::_npu_fused_infer_attention_score_get_max_workspace", ""): _workspace(1),
    ("npu::npu_fused_infer_attention_score_v2", ""): _attention(2),
    ("npu::npu_fused_infer_attention_score_v2", "out"): _into(2),
    ("npu::_npu_fused_infer_attention_score_v2_get_max_workspace", ""): _workspace(2),
    ("npu::npu_scatter_pa_kv_cache", ""): cache.scatter,
    ("atb::_npu_reshape_and_cache", ""): cache.reshape_and_cache,
    ("npu::npu_rms_norm", ""): fused.rms_norm,
    ("npu::npu_rotary_mul", ""): fused.rotary_mul,
    ("npu::npu_swiglu", ""): fused.swiglu,
}
"""What is emulated, by name and overload."""
