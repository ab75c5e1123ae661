"""What a decoder is to the engine, whichever one runs the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Attend = Callable[[int, "Tensor", "Tensor", "Tensor", "Tensor"], None]
"""attend(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D], out [T, Hq, D]): a backend's, with the plan bound."""


class Decoder(Protocol):
    """A model with its weights. Not for two threads at once.

    `nbytes` counts the weights, `bytes_per_step` those of them that a step reads, at most; `sinks` maps a layer to its
    learned sinks [Hq], for the backend to bind. `why_no_graph`: one line where a forward decides on the host, or waits
    for the device, and so cannot be recorded; else None.
    """

    nbytes: int
    bytes_per_step: int
    sinks: Mapping[int, Tensor]
    why_no_graph: str | None

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Logits [n, V] in float32 of the tokens `rows` [n] (None: all T); where the model makes vectors, their final
        hidden states [n, H].

        ids, positions [T] int64 on the backend's device. Calls `attend` once a layer, in order. Tensors that are kept
        from call to call stay where they are once the largest step has been run.
        """
