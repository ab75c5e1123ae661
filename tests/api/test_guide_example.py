"""docs/backend-guide.md: its backend on a torch device is clean, runs and is right; its tables name what is there."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.api import Batch, GroupSpec, LayerSpec, Limits, OutOfDeviceMemory, PoolSpec, UnsupportedError
from pagedkv.api.torch_backend import DeviceBackend
from pagedkv.api.torch_streams import HostRuntime

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "backend-guide.md").read_text("utf-8")
SECTION = GUIDE[GUIDE.index("### On a device that torch has") : GUIDE.index("## 5. Extensions")]
BLOCKS = re.findall(r"^```python\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)
HEADS, KV_HEADS, DIM, SIZE = 4, 2, 16, 8


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What both blocks define, as one module."""
    module = type(sys)("guide_example")
    sys.modules[module.__name__] = module  # where its dataclasses look for their annotations
    for block in BLOCKS:
        exec(compile(block, "docs/backend-guide.md", "exec"), vars(module))
    return vars(module)


def spec(**given: Any) -> PoolSpec:
    layer = LayerSpec(index=0, q_heads=HEADS, kv_heads=KV_HEADS, k_dim=DIM, v_dim=DIM, scale=0.25)
    group = GroupSpec(layers=(layer,), block_size=SIZE, kv_dtype="fp32")
    limits = Limits(rows=4, tokens=64, context=64)
    return PoolSpec(**{"groups": (group,), "num_blocks": 9, "dtype": "fp32", "limits": limits} | given)


def batch(queries: list[int], contexts: list[int], table: np.ndarray, slots: list[int]) -> Batch:
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    return Batch(
        num_seqs=len(queries),
        num_tokens=sum(queries),
        cu_q=starts,
        ctx_len=np.array(contexts, np.int32),
        block_table=table,
        rows=np.arange(len(queries), dtype=np.int32),
        slots=np.array(slots, np.int64),
        max_q=max(queries),
        max_ctx=max(contexts),
    )


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of one sequence in float64, a query and a head at a time: (result, log-sum-exp)."""
    out, logs = torch.zeros_like(q, dtype=torch.float64), torch.zeros(q.shape[:2], dtype=torch.float64)
    for j in range(len(q)):
        seen = len(k) - len(q) + j + 1
        for head in range(HEADS):
            shared = head * KV_HEADS // HEADS
            scores = k[:seen, shared].double() @ q[j, head].double() * 0.25
            out[j, head] = scores.softmax(0) @ v[:seen, shared].double()
            logs[j, head] = scores.exp().sum().log()
    return out, logs


def test_the_example_is_right_after_a_prefix_and_beside_another_row(names: dict[str, Any]) -> None:
    backend = names["MyBackend"](names["CAN"], HostRuntime())
    pool, host = backend.alloc_pool(spec()), backend.alloc_pool(spec(placement="host"))
    made = torch.Generator().manual_seed(0)
    k, v = (torch.randn(12, KV_HEADS, DIM, generator=made) for _ in "kv")
    q = torch.randn(6, HEADS, DIM, generator=made)
    table = np.array([[3, 1, 0], [5, 0, 0]], np.int32)
    at = [3 * SIZE + i for i in range(8)] + [SIZE + i for i in range(2)]  # row 0: ten tokens, in blocks 3 and 1
    prefix = backend.plan(pool, 0, batch([6], [6], table, at[:6]))
    backend.attend(prefix, 0, q, k[:6], v[:6], torch.empty_like(q))
    step = backend.plan(pool, 0, batch([4, 2], [10, 2], table, [*at[6:], 5 * SIZE, 5 * SIZE + 1]))
    out, logs = torch.empty_like(q), torch.empty(6, HEADS)
    backend.attend(step, 0, q, k[6:], v[6:], out, extra={"lse": logs})
    for tokens, keys in ((slice(0, 4), slice(0, 10)), (slice(4, 6), slice(10, 12))):
        wanted, wanted_logs = by_hand(q[tokens], k[keys], v[keys])
        assert torch.allclose(out[tokens].double(), wanted, atol=1e-5)
        assert torch.allclose(logs[tokens].double(), wanted_logs, atol=1e-5)
    backend.copy_blocks(pool, host, np.array([[3, 2]]))
    backend.copy_blocks(host, pool, np.array([[2, 7]]))
    assert torch.equal(pool.blocks[7], pool.blocks[3]) and pool.blocks[3].any()
    backend.close()


def test_the_example_refuses_with_the_contracts_errors(names: dict[str, Any]) -> None:
    backend = names["MyBackend"](names["CAN"], HostRuntime())
    with pytest.raises(UnsupportedError, match="fp16"):
        backend.alloc_pool(spec(dtype="fp16"))
    with pytest.raises(OutOfDeviceMemory, match="num_blocks"):
        backend.alloc_pool(spec(num_blocks=1 << 45))
    backend.close()


def test_the_blocks_are_formatted_and_clean() -> None:
    assert len(BLOCKS) == 2
    for block in BLOCKS:
        for how in (["format", "--diff"], ["check", "--quiet", "--ignore", "I001"]):
            command = [sys.executable, "-m", "ruff", *how, "--config", str(ROOT / "pyproject.toml"), "-"]
            done = subprocess.run(command, input=block, capture_output=True, text=True, cwd=ROOT)
            assert done.returncode == 0, done.stdout + done.stderr


def test_the_tables_name_what_is_there() -> None:
    for name in re.findall(r"`(make_\w+|append|rows|copy|against|op|collectives_note)`", SECTION):
        assert hasattr(DeviceBackend, name), name
    for name in re.findall(r"`(\w+\.py)`", SECTION):
        assert (ROOT / "backends" / "pagedkv_ascend" / name).is_file(), name
    for name in re.findall(r"`(?:pagedkv\.api\.)?(checks|torch_\w+)`", SECTION):
        assert importlib.import_module(f"pagedkv.api.{name}").__doc__
