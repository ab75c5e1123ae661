"""How far kernels are from float64, gathered while the tests run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import triton

Kind = tuple[str, str, str]
_found: dict[Kind, list[dict[str, float]]] = {}


def note(kernel: str, dtype: torch.dtype, got: torch.Tensor, exact: np.ndarray, stored: torch.dtype | None = None):
    """One result of `kernel` in `dtype`, over a cache of `stored`, beside the exact one."""
    kind = (kernel, str(dtype)[6:], str(stored or dtype)[6:])
    rounded = torch.from_numpy(exact).to(dtype)
    _found.setdefault(kind, []).append({**_distance(got, exact), **_distance(rounded, exact, "floor_")})


def _distance(got: torch.Tensor, exact: np.ndarray, prefix: str = "") -> dict[str, float]:
    off = got.double().numpy() - exact
    size = np.linalg.norm(exact)
    return {
        f"{prefix}max_abs": float(np.abs(off).max(initial=0.0)),
        f"{prefix}frobenius": float(np.linalg.norm(off) / size) if size else 0.0,
    }


def write(path: Path) -> None:
    """The largest error of each kind, and that of float64's result merely rounded to the dtype (`floor_`)."""
    rows = [
        dict(zip(("kernel", "dtype", "cache"), kind, strict=True))
        | {"cases": len(cases)}
        | {name: max(case[name] for case in cases) for name in cases[0]}
        for kind, cases in sorted(_found.items())
    ]
    path.write_text(json.dumps({"triton": triton.__version__, "errors": rows}, indent=1) + "\n", "utf-8")
