"""A device "npu:0" in stock torch, for a process of its own: tensors that compute on the processor and refuse its own.

    python fake_device.py      runs the backend on it and prints JSON, by name of what was done

The processor in an NPU's place takes a tensor that somebody forgot to move; an NPU does not, and neither does this.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (  # type: ignore[attr-defined]
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

if TYPE_CHECKING:
    from pagedkv.api import PoolSpec
    from pagedkv_ascend.backend import AscendBackend
    from tests.backends.ascend.sequences import Sequences

ROOT = Path(__file__).resolve().parents[3]
MOVES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
"""What may take tensors of both."""


class OnNpu(torch.Tensor):
    """A tensor of the device; `data_here` is where its numbers are."""

    data_here: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> OnNpu:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            data.shape,
            strides=data.stride(),
            storage_offset=data.storage_offset(),
            dtype=data.dtype,
            device="npu:0",
        )
        made.data_here = data
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        named = dict(named or {})
        if operator not in MOVES:
            _refuse_others(operator, (given, named))
        target = named.get("device")
        if target is not None:
            named["device"] = "cpu"
        made = operator(*tree_map(_here, given), **tree_map(_here, named))
        if target is not None and torch.device(target).type == "cpu":
            return made
        if any(one.alias_info is not None and one.alias_info.is_write for one in operator._schema.arguments):
            return given[0] if isinstance(made, torch.Tensor) else made
        return tree_map(lambda one: OnNpu(one) if isinstance(one, torch.Tensor) else one, made)


def _here(value: Any) -> Any:
    return value.data_here if isinstance(value, OnNpu) else value


def _refuse_others(operator: Any, given: Any) -> None:
    for one in tree_leaves(given):
        if isinstance(one, torch.Tensor) and not isinstance(one, OnNpu) and one.dim():
            raise RuntimeError(f"{operator}: expected all tensors to be on npu:0, found one on {one.device}")


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> OnNpu:
    return OnNpu(torch.empty(size, dtype=dtype))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> OnNpu:
    return OnNpu(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _here(target).copy_(_here(source))
    return target


def install() -> torch.library.Library:
    """torch.npu, the device "npu:0", and what makes a tensor there; keep what is returned."""
    from tests.backends.ascend.fake_npu import FakeNpu

    class Module(FakeNpu, _DummyBackendModule):  # type: ignore[misc]
        """The stand-in for torch.npu, with what torch asks of any device's module."""

    _setup_privateuseone_for_python_backend("npu", backend_module=Module())
    made = torch.library.Library("aten", "IMPL", "PrivateUse1")
    made.impl("empty.memory_format", _empty)
    made.impl("empty_strided", _empty_strided)
    made.impl("_copy_from", _copy_from)
    real = torch.empty

    def empty(*size: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return real(*size, **more)  # nothing here pins memory

    torch.empty = empty  # type: ignore[assignment]
    return made


# -- what is done there ------------------------------------------------------------------------------------------------


def right() -> dict[str, str]:
    """Append, decode, prompts and copies with all tensors on the device: "" where float64 agrees."""
    from tests.backends.ascend.pools import layer, spec

    layers = {"plain": layer(), "window": layer(window=5), "sinks": layer(v_dim=16, sinks=True)}
    said = {}
    for size in (32, 128):
        for name, one in layers.items():
            said |= {f"{name}, {size}: {what}": text for what, text in _steps(spec(one, block_size=size))}
    return said


def _steps(wanted: PoolSpec) -> Iterator[tuple[str, str]]:
    import numpy as np

    from tests.backends.ascend.sequences import Sequences

    backend = _backend()
    rows, one = Sequences(backend, wanted, [40, 3]), wanted.groups[0].layers[0]
    if one.sinks:
        backend.bind(rows.pool, 0, {"sinks": np.full(one.q_heads, -40.0)})  # too small to be seen
    yield "prompts", _asked(lambda: rows.check(rows.step([0, 0], [20, 2]), [0, 0]))
    yield "cached", _asked(lambda: rows.check(rows.step([20, 2], [18, 1]), [20, 2]))
    host = backend.alloc_pool(dataclasses.replace(wanted, placement="host"))
    saved = backend.copy_blocks(rows.pool, host, np.array([[1, 5], [2, 6]]))
    for plane in (plane for planes in rows.pool.planes.values() for plane in planes):
        plane[1:3].fill_(0xFF)
    backend.wait(backend.copy_blocks(host, rows.pool, np.array([[5, 7], [6, 2]]), after=saved))
    backend.wait(backend.copy_blocks(rows.pool, rows.pool, np.array([[7, 1]])))
    yield "decode", _asked(lambda: rows.check(rows.step([38], [1]), [38]))
    yield "static plan", _asked(lambda: rows.check(_static(backend, rows, 39), [39]))


def _static(backend: AscendBackend, rows: Sequences, at: int) -> list[torch.Tensor]:
    """The first row's token of this place, by a plan as recordings have it."""
    from pagedkv.api.extensions import GraphShape
    from pagedkv.core.step import padded
    from tests.backends.ascend.sequences import batch

    graphs = backend.extension("graph")
    plan = graphs.static_plan(rows.pool, 0, GraphShape(rows=2, tokens=2, max_ctx=2 * rows.size))
    graphs.refresh(plan, padded(batch([(at + 1, 1)], size=rows.size), 2))
    q, k, v = (torch.cat([many[0][at : at + 1]] * 2).to("npu:0") for many in (rows.q, rows.k, rows.v))
    out = torch.empty(2, rows.layer.q_heads, rows.layer.v_dim, dtype=q.dtype, device="npu:0")
    backend.attend(plan, 0, q, k, v, out)
    return [out.cpu()[:1]]


def ops() -> dict[str, str]:
    """The fused ops with all tensors on the device, and with weights that stayed on the processor."""
    from pagedkv.api import OpSpec

    backend = _backend()
    x, weight = torch.ones(3, 64, dtype=torch.float16), torch.ones(64, dtype=torch.float16)
    angles = torch.zeros(3, 16)
    made: dict[str, Any] = {
        name: backend.op(name, OpSpec(dtype="fp16", dims={"rotary_dim": 32, "q_heads": 2, "kv_heads": 2}))
        for name in ("rms_norm", "add_rms_norm", "silu_mul", "rope")
    }
    there, w, rows = x.to("npu:0"), weight.to("npu:0"), torch.ones(3, 2, 32, dtype=torch.float16).to("npu:0")
    return {
        "rms_norm": _asked(lambda: made["rms_norm"](there, w, 1e-6)),
        "add_rms_norm": _asked(lambda: made["add_rms_norm"](there, there.clone(), w, 1e-6)),
        "silu_mul": _asked(lambda: made["silu_mul"](there)),
        "rope": _asked(lambda: made["rope"](rows, rows.clone(), angles.to("npu:0"), angles.to("npu:0"))),
        "rms_norm, forgotten weight": _asked(lambda: made["rms_norm"](there, weight, 1e-6)),
    }


def _backend() -> AscendBackend:
    from pagedkv_ascend import environment, limits
    from pagedkv_ascend.backend import AscendBackend
    from pagedkv_ascend.capabilities import declared
    from pagedkv_ascend.runtime import NpuRuntime
    from tests.backends.ascend.emulation import operators

    operators.install()
    chip = limits.chip("910B3")
    assert chip is not None
    return AscendBackend(declared(chip), NpuRuntime(0, pooled=True), note=environment.collectives_note(0))


class Forgetting:
    """One row of 20 tokens, and a further step in which something stayed on the processor."""

    def __init__(self) -> None:
        from tests.backends.ascend.pools import layer, spec
        from tests.backends.ascend.sequences import Sequences

        self.backend = _backend()
        self.rows = Sequences(self.backend, spec(layer(), block_size=128), [40])
        self.rows.step([0], [20])

    def step(self, count: int, forget: Callable[[Any], None]) -> str:
        """What the device says; "" where it took it."""
        from tests.backends.ascend.sequences import batch

        plan: Any = self.backend.plan(self.rows.pool, 0, batch([(20 + count, count)], size=128))
        forget(plan)
        q, k, v = (many[0][:count].to("npu:0") for many in (self.rows.q, self.rows.k, self.rows.v))
        return _asked(lambda: self.backend.attend(plan, 0, q, k, v, torch.empty_like(q)))

    def nothing(self, plan: Any) -> None:
        return

    def slots(self, plan: Any) -> None:
        plan.slots = plan.slots.cpu()

    def table(self, plan: Any) -> None:
        plan.views[None].table = plan.views[None].table.cpu()

    def mask(self, plan: Any) -> None:
        self.backend._attention._mask = torch.ones(2048, 2048, dtype=torch.int8).triu_(1)


def forgotten() -> dict[str, str]:
    """Of each thing that stayed on the processor what the device says."""
    row = Forgetting()
    return {
        "nothing": row.step(1, row.nothing),
        "slots": row.step(1, row.slots),
        "table": row.step(1, row.table),
        "mask": row.step(10, row.mask),
    }


def _asked(act: Callable[[], None]) -> str:
    try:
        act()
    except (RuntimeError, AssertionError) as error:
        return str(error) or type(error).__name__
    return ""


def main() -> None:
    sys.path.insert(0, str(ROOT))
    kept = install()
    device = str(torch.zeros(1, device="npu").device)
    print(json.dumps({"right": right(), "ops": ops(), "forgotten": forgotten(), "device": device}))
    del kept


if __name__ == "__main__":
    main()
