"""Launches sampling on the device: ids without bringing logits to the host."""

from __future__ import annotations

import torch

from pagedkv.api.errors import ContractViolation
from pagedkv_cuda.kernels.grids import one_axis, power_of_two
from pagedkv_cuda.kernels.jit_sampling import greedy_row, sample_row
from pagedkv_cuda.kernels.tiles import target_of

BLOCK = 4096
"""Logits that one program looks at a time."""


def _warps(target: int) -> int:
    """Of `sample`: with 8, a block's keys do not fit into the registers of 12.0; with 16, Triton 3.6 spills on 8.7."""
    return 16 if target >= 120 else 8


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The most probable id of each row: logits [n, V] -> int32 [n]; of equal logits the lowest id.

    -1 stands for a row with a NaN, or with nothing above minus infinity.
    """
    _check_logits(logits)
    ids = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    if len(logits):
        vocab, block = _widths(logits)
        greedy_row[one_axis(len(logits), "greedy")](logits, ids, logits.stride(0), V=vocab, BLOCK=block, num_warps=8)
    return ids


def sample(
    logits: torch.Tensor,
    numbers: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    *,
    target: int | None = None,
) -> torch.Tensor:
    """One id for each row: logits [n, V], numbers [n] in [0, 1) -> int32 [n].

    The k most probable tokens stay (top_k [n] int32, at least 1; V is off), of these the fewest that hold top_p [n] of
    their mass (1 is off); the id is the first, in the order of ids, whose cumulated probability exceeds the row's
    number. temperature [n]; 0 is greedy. Plus infinity takes the lowest id that has it; -1 as in `greedy`.
    Masses are summed in float32: a cut within 1e-6 of a token's edge may fall on either side of it.
    numbers, temperature and top_p are float32.
    """
    _check_logits(logits)
    columns = {"numbers": numbers, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    for name, column in columns.items():
        _check_column(name, column, logits, torch.int32 if name == "top_k" else torch.float32)
    ids = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    if len(logits):
        vocab, block = _widths(logits)
        sample_row[one_axis(len(logits), "sampling")](
            logits, numbers, temperature, top_k, top_p, ids, logits.stride(0), V=vocab, BLOCK=block,
            num_warps=_warps(target or target_of(logits.device)),
        )  # fmt: skip
    return ids


def _check_logits(logits: torch.Tensor) -> None:
    if logits.ndim != 2 or not logits.shape[1] or logits.stride(1) != 1 or not logits.is_floating_point():
        raise ContractViolation(
            f"logits of shape {tuple(logits.shape)}, strides {logits.stride()}, {logits.dtype}: give floating-point "
            "numbers [n, V] whose rows are contiguous",
            law="ops",
        )


def _check_column(name: str, column: torch.Tensor, logits: torch.Tensor, dtype: torch.dtype) -> None:
    wanted = ((len(logits),), dtype, logits.device)
    if (tuple(column.shape), column.dtype, column.device) != wanted or not column.is_contiguous():
        raise ContractViolation(
            f"{name} of shape {tuple(column.shape)}, {column.dtype}, on {column.device}: give one contiguous {dtype} "
            f"for each of the {len(logits)} rows, on {logits.device}",
            law="ops",
        )


def _widths(logits: torch.Tensor) -> tuple[int, int]:
    return logits.shape[1], min(power_of_two(logits.shape[1]), BLOCK)
