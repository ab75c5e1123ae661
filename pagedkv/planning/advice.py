"""What to change when not all sequences fit at full length: length, sequences, KV dtype, weights, in this order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pagedkv.api.errors import ConfigError, UnsupportedError
from pagedkv.config import EngineConfig, show_bytes
from pagedkv.engine.setup import Agreed, agree
from pagedkv.models.checkpoint import Checkpoint
from pagedkv.models.tensor_shapes import tensor_shapes
from pagedkv.models.weight_plan import plan_weights
from pagedkv.planning.cost import is_known, number_bytes, token_bytes
from pagedkv.planning.fit import Fit

GROUP = 32
"""Numbers of a row that share a scale in the GGUF types below."""
WEIGHT_TYPES = ("Q8_0", "Q4_0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One change. `value` None: this change alone does not help. `sequences`: at full length once it is made."""

    setting: str
    value: str | None
    effect: str
    sequences: int | None = None

    def __str__(self) -> str:
        change = self.setting if self.value is None else f"{self.setting}={self.value}"
        return f"{change}: {self.effect}"


def advise(fit: Fit, config: EngineConfig) -> tuple[Advice, ...]:
    """Each change by itself, with its number."""
    return (_length(fit), _sequences(fit), *_kv_dtype(fit, config), *_weights(fit, config))


def _length(fit: Fit) -> Advice:
    sequences = fit.limits.rows
    longest = fit.longest(sequences)
    if not longest:
        return Advice(setting="max_model_len", value=None, effect=f"no length lets {sequences} sequences fit")
    effect = f"all {sequences} sequences fit at once"
    return Advice(setting="max_model_len", value=str(longest), effect=effect, sequences=sequences)


def _sequences(fit: Fit) -> Advice:
    length = fit.limits.context
    most = fit.most(length)
    if not most:
        return Advice(setting="max_num_seqs", value=None, effect=f"not even one sequence of {length} tokens fits")
    effect = f"as many of {length} tokens fit at once"
    return Advice(setting="max_num_seqs", value=str(most), effect=effect, sequences=most)


def _kv_dtype(fit: Fit, config: EngineConfig) -> Iterator[Advice]:
    """The first that the backend accepts of each smaller size, the widest first."""
    now, layers = fit.agreed.choice.kv_dtype, fit.agreed.spec.groups[0].layers
    found = widest = number_bytes(now)
    offered = [dtype for dtype in fit.target.backend.capabilities().kv_dtypes if is_known(dtype)]
    for dtype in sorted(offered, key=number_bytes, reverse=True):
        changed = _agreed(fit, config, kv_cache_dtype=dtype) if number_bytes(dtype) < found else None
        if changed is not None:
            found = number_bytes(dtype)
            before, after = (show_bytes(token_bytes(layers, one)) for one in (now, dtype))
            effect = f"{after} a token instead of {before}"
            yield _changed("kv_cache_dtype", dtype, effect, dataclasses.replace(fit, agreed=changed))
    if found == widest:
        yield Advice(
            setting="kv_cache_dtype", value=None, effect=f"the backend stores nothing narrower than {now} here"
        )


def _weights(fit: Fit, config: EngineConfig) -> Iterator[Advice]:
    held, found = fit.agreed.weights.nbytes, False
    for changed, setting, value in _lighter(fit, config):
        if changed.weights.nbytes < held:
            effect = f"weights take {show_bytes(changed.weights.nbytes)} instead of {show_bytes(held)}"
            found = True
            yield _changed(setting, value, effect, dataclasses.replace(fit, agreed=changed))
    if not found:
        yield _lighter_model(fit)


def _lighter_model(fit: Fit) -> Advice:
    """What weights may take at most; said where no other form of these is lighter on this backend."""
    weights, length, wanted = fit.agreed.request.weights, fit.limits.context, fit.limits.rows
    held = f"no other form that this backend multiplies takes less than {show_bytes(weights)}"
    for sequences in (wanted, 1):
        most = (fit.ceiling() or 0) - (fit.needs(sequences, length) - weights)
        if 0 < most < weights:
            effect = f"{held}; a model of at most {show_bytes(most)} would let {sequences} of {length} tokens fit"
            return Advice(setting="weights", value=None, effect=effect)
    whom = f"all {wanted}" if fit.holds(1, length) else "even one"
    return Advice(setting="weights", value=None, effect=f"{held}, and no model is so small that {whom} would fit")


def _lighter(fit: Fit, config: EngineConfig) -> Iterator[tuple[Agreed, str, str]]:
    """Other ways to hold the weights, and the setting for each."""
    if fit.agreed.choice.dtype == "fp32":
        for dtype in fit.target.backend.capabilities().dtypes:
            changed = None if dtype == "fp32" else _agreed(fit, config, dtype=dtype)
            if changed is not None:
                yield changed, "dtype", dtype
                break
    if any(tally.against for tally in fit.agreed.weights.tallies):
        kept = _agreed(fit, config, quantization="gguf")
        if kept is not None:
            yield kept, "quantization", "gguf"
    if isinstance(fit.checkpoint, Checkpoint) and not fit.agreed.weights.packed:
        for kind in WEIGHT_TYPES:
            yield _in_format(fit, fit.checkpoint, kind), "a GGUF file of this model with weights", kind


def _in_format(fit: Fit, checkpoint: Checkpoint, kind: str) -> Agreed:
    """As if every matrix came in this type; what the backend does not multiply becomes plain numbers."""
    shapes = tensor_shapes(checkpoint.config)
    formats = {name: kind for name, shape in shapes.items() if len(shape) == 2 and shape[1] % GROUP == 0}
    weights = plan_weights(checkpoint.config, formats, fit.target.backend, fit.agreed.choice.dtype, None)
    request = dataclasses.replace(fit.agreed.request, weights=weights.nbytes)
    return dataclasses.replace(fit.agreed, weights=weights, request=request)


def _agreed(fit: Fit, config: EngineConfig, **changes: Any) -> Agreed | None:
    """The same with other settings; None where they are refused."""
    try:
        return agree(dataclasses.replace(config, **changes), fit.target.selected, fit.target.backend, fit.checkpoint)
    except (UnsupportedError, ConfigError):
        return None


def _changed(setting: str, value: str, effect: str, fit: Fit) -> Advice:
    length, wanted = fit.limits.context, fit.limits.rows
    most = min(fit.most(length), wanted)
    longest = 0 if most else fit.longest(1)
    if not most and not longest:
        return Advice(setting=setting, value=None, effect=f"{value} would not help: {effect}, and not one block fits")
    if not most:
        effect += f"; the longest sequence is then {longest} tokens"
    return Advice(
        setting=setting, value=value, effect=f"{effect}; {most} of {wanted} fit at {length} tokens", sequences=most
    )
