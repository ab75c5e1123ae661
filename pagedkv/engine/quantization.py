"""Which weights stay packed, settled and told before one is read; and the line on a quantized cache."""

from __future__ import annotations

from collections.abc import Iterable

from pagedkv.api import Capabilities
from pagedkv.api.errors import ConfigError, UnsupportedError
from pagedkv.config import DTYPES, EngineConfig, show_bytes
from pagedkv.core.negotiation import is_quantized
from pagedkv.models.bridge import BridgedCheckpoint
from pagedkv.models.checkpoint import Checkpoint
from pagedkv.models.weight_plan import Tally, WeightPlan
from pagedkv.ops.gguf_quants import named_type


def against_packing(config: EngineConfig, checkpoint: Checkpoint | BridgedCheckpoint) -> str | None:
    """Why no weight may stay in its blocks, None where it may.

    Raises `ConfigError` where blocks are asked for of a model that has none.
    """
    if config.quantization == "gguf":
        if not any(named_type(kind).quantized for kind in checkpoint.formats.values()):
            raise ConfigError(
                f"quantization='gguf' keeps the quantized weights of a GGUF file, and {checkpoint.path} "
                f"({checkpoint.format}) has none: leave it out, or give a file with quantized weights"
            )
        return None
    if config.quantization == "none":
        return "quantization='none'"
    if DTYPES[config.dtype] is not None:
        return f"dtype={config.dtype!r} was given; quantization='gguf' would keep them packed"
    return None


def check_packing(config: EngineConfig, plan: WeightPlan, can: Capabilities, backend: str) -> None:
    """Raises `UnsupportedError` where blocks are asked for and the backend has a product for none of the file's."""
    if config.quantization == "gguf" and not plan.packed:
        accepted = ", ".join(sorted(can.weight_formats)) or "none"
        raise UnsupportedError(
            f"backend {backend} does not support quantization='gguf' for this file: {_listed(_quantized(plan))}; "
            f"accepted: {accepted}; leave quantization out to have the weights dequantized, or choose another file"
        )


def name_of(plan: WeightPlan) -> str:
    """What is in use, in a word or two: "gguf (Q4_1, Q8_0)" or "none"."""
    return f"gguf ({', '.join(plan.formats)})" if plan.packed else "none"


def describe(plan: WeightPlan, dtype: str) -> str | None:
    """One line on which weights stay packed, which do not and why; None where the file holds plain numbers."""
    if not _quantized(plan):
        return None
    rest = f"dequantized to {dtype}: {_listed(t for t in plan.tallies if t.against)}"
    if not plan.packed:
        return f"quantization none: {rest}"
    kept = _listed(t for t in plan.tallies if not t.against)
    return (
        f"quantization {name_of(plan)}: kept packed: {kept}; {rest}; "
        "the products with packed weights may round activations to 8 bits"
    )


def describe_cache(kv_dtype: str) -> list[str]:
    """One line on what a quantized cache does to keys and values; none where it is not quantized."""
    if not is_quantized(kv_dtype):
        return []
    codes, _, scales = kv_dtype.partition("/")
    whose = {
        "token_head": "each token and head with a scale of its own",
        "tensor": "scales 1.0, as none are read from checkpoints: what is beyond the format's largest number is cut",
    }
    return [f"cache {kv_dtype}: keys and values are rounded to {codes}, a byte each, {whose.get(scales, 'scaled')}"]


def weights_note(plan: WeightPlan) -> str:
    """What the budget says of the weights besides their bytes."""
    notes = [f"quantization {name_of(plan)}"] if plan.packed else []
    if plan.twice:
        notes.append(f"the embedding table is held twice, once more for the head: {show_bytes(plan.twice)}")
    return "; ".join(notes)


def _quantized(plan: WeightPlan) -> list[Tally]:
    return [tally for tally in plan.tallies if named_type(tally.format).quantized]


def _listed(tallies: Iterable[Tally]) -> str:
    return ", ".join(_one(tally) for tally in tallies) or "nothing"


def _one(tally: Tally) -> str:
    count = "1 tensor" if tally.tensors == 1 else f"{tally.tensors} tensors"
    why = f": {tally.against}" if tally.against else ""
    return f"{tally.format} ({count}, {show_bytes(tally.nbytes)}{why})"
