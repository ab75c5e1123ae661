"""What the vendor's operators allow, from `limits.toml`, and the checks of it: none reaches an operator unchecked."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv.api import GroupSpec, LayerSpec, PoolSpec, UnsupportedError

NATIVE, GENERIC = 80, 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One row of the table. `attention`: whether the fused operator of this backend exists on it."""

    names: tuple[str, ...]
    series: str
    dtypes: tuple[str, ...]
    attention: bool


@functools.cache
def table() -> dict[str, Any]:
    """limits.toml."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(Path(__file__).with_name("limits.toml").read_text("utf-8"))


def chip(name: str) -> Chip | None:
    """The row of a chip, "910B3" or "Ascend910B3"; None for one that is not in the table."""
    plain = name.strip().removeprefix("Ascend").strip()
    row = next((row for row in table()["chip"] if plain in row["names"]), None)
    return None if row is None else Chip(**{**row, "names": tuple(row["names"]), "dtypes": tuple(row["dtypes"])})


def fits(size: int, allowed: list[int]) -> bool:
    """Whether [multiple of, least, most] allows a size."""
    multiple, least, most = allowed
    return least <= size <= most and size % multiple == 0


def spell(allowed: list[int]) -> str:
    """ "16..512 in steps of 16"."""
    return f"{allowed[1]}..{allowed[2]} in steps of {allowed[0]}"


def pages_prompts(block_size: int) -> bool:
    """Whether rows of several query tokens can be read through the block table at this block size."""
    return fits(block_size, table()["attention"]["many_queries"]["block_size"]["bf16"])


# -- a pool ------------------------------------------------------------------------------------------------------------


def width(layer: LayerSpec) -> int:
    """Numbers of one head in the cache: keys and values lie equally wide, the narrower ones with zeros behind."""
    return max(layer.k_dim, layer.v_dim)


def parts(layer: LayerSpec, group: GroupSpec, num_blocks: int) -> int | None:
    """Into how many tensors, each with an equal part of the KV heads, a layer's keys must be cut; None: no way."""
    most, numbers = table()["attention"], num_blocks * group.block_size * width(layer)
    for count in range(1, layer.kv_heads + 1):
        heads = layer.kv_heads // count
        short = layer.kv_heads % count == 0 and heads * width(layer) <= most["width"]
        if short and numbers * heads <= most["elements"]:
            return count
    return None


def reasons_against_pool(spec: PoolSpec) -> list[str]:
    """What the operators do not allow of a pool, beyond what capabilities can say: one sentence each."""
    found = []
    for number, group in enumerate(spec.groups):
        for layer in group.layers:
            found += [f"group {number}: layer {layer.index}: {why}" for why in _of_layer(layer)]
    if spec.limits.rows > (most := table()["attention"]["batch"]):
        found.append(f"{spec.limits.rows} sequences in a step, the attention operator takes at most {most}")
    return found


def _of_layer(layer: LayerSpec) -> Iterator[str]:
    most = table()["attention"]
    if max(layer.q_heads, layer.kv_heads) > most["heads"]:
        yield f"{layer.q_heads} query heads, the attention operator takes at most {most['heads']}"
    if layer.q_heads % max(1, layer.kv_heads):
        yield f"{layer.q_heads} query heads cannot share {layer.kv_heads} KV heads evenly, as the operator wants it"


def reasons_against_size(spec: PoolSpec, more: int) -> list[str]:
    """The same of its number of blocks, with so many `more` behind them in each tensor."""
    most = table()["attention"]["elements"]
    found = []
    for group in spec.groups:
        for layer in group.layers:
            if layer.kv_of is None and parts(layer, group, spec.num_blocks + more) is None:
                least = most // (group.block_size * width(layer)) - more
                found.append(
                    f"layer {layer.index}: {spec.num_blocks} blocks make a tensor of one KV head larger than the "
                    f"operator's {most} elements: give at most {least} blocks (num_blocks)"
                )
    return found


# -- a call ------------------------------------------------------------------------------------------------------------


def check_attention(
    query: tuple[int, ...], cache: tuple[int, ...], dtype: str, *, kv_heads: int, block_size: int, context: int
) -> None:
    """`UnsupportedError` unless the attention operator allows the call.

    query (batch, query tokens, heads, dim); cache (blocks, block size, KV heads x dim), or, where `block_size` is 0,
    (batch, keys, KV heads x dim); `context`: the most keys of a sequence.
    """
    most = table()["attention"]
    batch, tokens, heads, dim = query
    phase = most["one_query" if tokens == 1 else "many_queries"]
    reasons = []
    if dtype not in most["dtypes"]:
        reasons.append(f"dtype {dtype} is none of {', '.join(most['dtypes'])}")
    elif block_size and not fits(block_size, phase["block_size"][dtype]):
        reasons.append(f"block size {block_size} is not within {spell(phase['block_size'][dtype])}")
    if not fits(dim, most["head_dim"]):
        reasons.append(f"head dim {dim} is not within {spell(most['head_dim'])}")
    if heads > most["heads"] or heads % kv_heads or heads // kv_heads > most["ratio"]:
        reasons.append(f"{heads} heads on {kv_heads}: at most {most['heads']} and {most['ratio']} to one, evenly")
    if cache[2] > most["width"] and block_size:
        reasons.append(f"{cache[2]} numbers of a token, at most {most['width']}")
    if (elements := cache[0] * cache[1] * cache[2]) > most["elements"]:
        reasons.append(f"a tensor of {elements} elements, at most {most['elements']}")
    if batch > most["batch"] or context > phase["context"]:
        reasons.append(f"{batch} sequences of up to {context} keys, at most {most['batch']} of {phase['context']}")
    if reasons:
        raise UnsupportedError([f"npu_fused_infer_attention_score: {reason}" for reason in reasons])
