"""What a user asks of one text's vector, under the names that users of such engines know."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from pagedkv.api.errors import RequestInvalid


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """How one text becomes a vector: as the model says, where nothing else is asked for.

    `dimensions` keeps that many numbers, the first ones, which models trained for it (Matryoshka) allow; the rest is
    cut off before the vector is normalized. `normalize` True divides a vector by its length, False leaves it as it is.
    Raises `RequestInvalid`.
    """

    dimensions: int | None = None
    normalize: bool | None = None

    def __post_init__(self) -> None:
        wanted = self.dimensions
        if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, Integral) or wanted < 1):
            raise RequestInvalid(
                f"dimensions={wanted!r} must be an integer of at least 1, or None for all", field="dimensions"
            )
        if self.normalize is not None and not isinstance(self.normalize, bool):
            raise RequestInvalid(
                f"normalize={self.normalize!r} must be True, False, or None for what the model says", field="normalize"
            )
