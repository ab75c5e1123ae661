"""U85: a block size or head size is refused by what the backend declares, before any weight is read."""

from __future__ import annotations

import pytest

from pagedkv.api import Capabilities, LayerSpec, UnsupportedError
from pagedkv.core.negotiation import Requirements, negotiate

CAN = Capabilities(
    dtypes=("fp32",),
    kv_dtypes=("fp32",),
    block_sizes=(frozenset({8}), (16, 16, 128)),
    head_dims=(frozenset({64, 128}),),
    preferred_block_size=16,
)


def ask(block_size: object, head_dim: int = 64):
    layer = LayerSpec(index=0, q_heads=4, kv_heads=2, k_dim=head_dim, v_dim=head_dim, scale=head_dim**-0.5)
    return negotiate(CAN, Requirements(layers=(layer,), block_size=block_size), backend="card")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [8, 16, 128])
def test_u85_a_declared_block_size_is_kept(size):
    assert ask(size).block_size == size


@pytest.mark.parametrize("size", [0, -1, 1, 3, 7, 24, 144, 16.0, "16", True])
def test_u85_another_one_is_refused_with_the_accepted_ones(size):
    with pytest.raises(UnsupportedError) as caught:
        ask(size)
    text = f"backend card does not support block_size={size!r}; accepted: 8 or multiples of 16 from 16 to 128"
    assert text in str(caught.value)


def test_u85_a_head_size_is_refused_and_every_reason_comes_at_once():
    with pytest.raises(UnsupportedError) as caught:
        ask(7, head_dim=80)
    assert len(caught.value.reasons) == 2
    assert "head_dim of layer 0=80; accepted: 64, 128" in caught.value.reasons[1]
