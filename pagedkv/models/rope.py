"""Rotary position tables: the inverse frequencies of each scaling kind, and cos and sin by position."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagedkv.api.errors import ModelError
from pagedkv.models.config import RopeConfig

_GROWTH = 1024
"""Positions are added to a table in multiples of this."""


class RopeTable:
    """cos and sin [positions, dim / 2] in float32, scaled by the kind's attention factor.

    Entries are computed on the host in float64 from float32 angles and rounded once, so an entry's bits depend neither
    on the device nor on when the table grew. Where positions live on the host the table grows as they come; elsewhere
    it is made whole up to `max_position`, because looking at positions there would wait for the device.
    `max_position` is the most positions that will ever be asked for; a longrope depends on it.
    """

    def __init__(self, rope: RopeConfig, max_position: int, device: str) -> None:
        self._inverse, self._scaling = inverse_frequencies(rope, max_position)
        self._device = torch.device(device)
        self._on_host = self._device.type == "cpu"
        self._cos = self._sin = torch.empty(0, rope.dim // 2, device=self._device)
        if not self._on_host:
            self.reserve(max_position)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables as they are now."""
        return self._cos.nbytes + self._sin.nbytes

    def reserve(self, positions: int) -> None:
        """Make sure that positions 0 .. positions - 1 are in the table."""
        have = self._cos.shape[0]
        if positions <= have:
            return
        target = max(-(-positions // _GROWTH) * _GROWTH, 2 * have)
        cos, sin = self._entries(have, target)
        self._cos = torch.cat([self._cos, cos])
        self._sin = torch.cat([self._sin, sin])

    def lookup(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, dim / 2] of int64 positions [T]."""
        if self._on_host and positions.numel():
            self.reserve(int(positions.max()) + 1)
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def _entries(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, stop, dtype=torch.float32)
        # The angle is rounded to float32 first, as transformers does: at far positions that rounding is what counts.
        angles = (positions[:, None] * self._inverse).double()
        cos, sin = angles.cos().float() * self._scaling, angles.sin().float() * self._scaling
        return cos.to(self._device), sin.to(self._device)


def inverse_frequencies(rope: RopeConfig, max_position: int = 0) -> tuple[Tensor, float]:
    """Inverse frequencies [dim / 2] in float32 and the factor for cos and sin, both as transformers computes them.

    A longrope takes its long factors where `max_position` exceeds its original length, for short texts too: keys that
    are in the cache cannot be turned anew when a text grows past that length.
    """
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    powers = rope.theta**exponents
    scaling = 1.0
    if rope.kind == "default":
        inverse = 1.0 / powers
    elif rope.kind == "linear":
        inverse = 1.0 / powers / rope.factor
    elif rope.kind == "llama3":
        inverse = _llama3(1.0 / powers, rope)
    elif rope.kind == "yarn":
        inverse, scaling = _yarn(powers, rope), yarn_attention_factor(rope)
    elif rope.kind == "longrope":
        inverse, scaling = 1.0 / (_longrope_factors(rope, max_position) * powers), longrope_attention_factor(rope)
    else:
        raise ModelError(f"rope kind {rope.kind!r} is not known; default, linear, llama3, yarn and longrope are")
    if rope.freq_factors is not None:
        inverse = inverse / torch.tensor(rope.freq_factors, dtype=torch.float32)
    return inverse, scaling


def _llama3(inverse: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones stay, those between blend. Source: Llama 3.1."""
    original = _given(rope.original_max_position, "original_max_position_embeddings")
    low, high = _given(rope.low_freq_factor, "low_freq_factor"), _given(rope.high_freq_factor, "high_freq_factor")
    wavelength = 2 * math.pi / inverse
    stretched = torch.where(wavelength > original / low, inverse / rope.factor, inverse)
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * stretched / rope.factor + blend * stretched
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, blended, stretched)


def _longrope_factors(rope: RopeConfig, max_position: int) -> Tensor:
    long = max_position > _given(rope.original_max_position, "original_max_position_embeddings")
    return torch.tensor(rope.long_factors if long else rope.short_factors, dtype=torch.float32)


def longrope_attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: given, or sqrt(1 + ln(factor) / ln(original)). Source: Ding et al. 2024."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    original = _given(rope.original_max_position, "original_max_position_embeddings")
    return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(original))


def _yarn(powers: Tensor, rope: RopeConfig) -> Tensor:
    """Entries that turn fast stay, slow ones are stretched, with a ramp between. Source: Peng et al. 2023."""
    low, high = _yarn_range(rope)
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - keep) + 1.0 / powers * keep


def _yarn_range(rope: RopeConfig) -> tuple[float, float]:
    """First and last entry of the ramp."""
    original = _given(rope.original_max_position, "original_max_position_embeddings")

    def entry(turns: float) -> float:
        return rope.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = entry(rope.beta_fast), entry(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    return low, high + 0.001 if low == high else high


def yarn_attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: given, or from mscale and mscale_all_dim, or 0.1 ln(factor) + 1."""

    def magnitude(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def _given(value: float | None, name: str) -> float:
    if value is None:
        raise ModelError(f"this rope kind needs {name}; add it to the model's rope parameters")
    return value
