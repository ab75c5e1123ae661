"""Negotiation: what is kept, what is filled in with a note, and every reason for a refusal."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.api import Capabilities, LayerSpec, UnsupportedError
from pagedkv.core.negotiation import Requirements, accepts, group_size, negotiate

CAN = Capabilities(
    dtypes=("bf16", "fp32", "fp16"),
    native_dtypes=("bf16", "fp32"),
    kv_dtypes=("bf16", "fp32", "int8/token_head"),
    block_sizes=((16, 16, 128),),
    head_dims=(frozenset({64, 128}),),
    preferred_block_size=32,
    max_group=8,
    features=frozenset({"window", "batch_invariant", "sinks"}),
)


def layer(index: int = 0, **kwargs) -> LayerSpec:
    shape = {"q_heads": 8, "kv_heads": 2, "k_dim": 64, "v_dim": 64, "scale": 0.125}
    return LayerSpec(index=index, **(shape | kwargs))


def agree(can: Capabilities = CAN, layers: tuple[LayerSpec, ...] = (layer(),), **wanted):
    return negotiate(can, Requirements(layers=layers, **wanted), backend="card")


def reasons(can: Capabilities = CAN, **wanted) -> tuple[str, ...]:
    with pytest.raises(UnsupportedError) as caught:
        agree(can, **wanted)
    return caught.value.reasons


def can(**changes) -> Capabilities:
    return dataclasses.replace(CAN, **changes)


@pytest.mark.parametrize(
    ("checkpoint", "native", "dtype", "note"),
    [
        ("fp32", ("bf16", "fp32"), "fp32", "the checkpoint's own"),
        ("fp16", ("bf16", "fp32"), "bf16", "fp16 is not at full speed on card"),
        ("fp16", (), "fp16", "the checkpoint's own"),
        ("fp8", (), "bf16", "fp8 is not available on card"),
        (None, (), "bf16", "the checkpoint has none"),
    ],
)
def test_dtype_auto_takes_the_checkpoints_if_native_else_the_preferred_and_says_why(checkpoint, native, dtype, note):
    choice = agree(can(native_dtypes=native, kv_dtypes=("bf16", "fp32", "fp16")), checkpoint_dtype=checkpoint)
    assert choice.dtype == choice.kv_dtype == dtype
    assert any(line.startswith(f"dtype {dtype}: ") and note in line for line in choice.notes)


def test_an_explicit_dtype_is_kept_even_when_slow_and_leaves_no_note():
    choice = agree(dtype="fp16", kv_dtype="bf16", block_size=16, checkpoint_dtype="bf16", batch_invariant=False)
    assert (choice.dtype, choice.kv_dtype, choice.block_size, choice.notes) == ("fp16", "bf16", 16, ())


def test_kv_dtype_unset_is_the_dtype_or_else_the_preferred_with_a_note():
    assert agree(dtype="fp32").kv_dtype == "fp32"
    choice = agree(dtype="fp16")
    assert choice.kv_dtype == "bf16" and "kv_dtype bf16: card stores no fp16, so its preferred one" in choice.notes


def test_kv_dtype_unset_is_never_quantized():
    choice = agree(can(kv_dtypes=("int8/token_head", "bf16")), dtype="fp16")
    assert choice.kv_dtype == "bf16"
    (reason,) = reasons(can(kv_dtypes=("int8/token_head", "fp8_e5m2/tensor")), dtype="fp16")
    assert "kv_dtype='auto'; accepted: int8/token_head, fp8_e5m2/tensor, quantized, if asked for by name" in reason
    (reason,) = reasons(can(kv_dtypes=("bf16", "int8/token_head")), dtype="bf16", kv_dtype="fp8_e4m3fn/tensor")
    assert "kv_dtype='fp8_e4m3fn/tensor'; accepted: bf16, int8/token_head" in reason


def test_block_size_unset_is_the_preferred_with_a_note_unless_it_is_the_usual_one():
    assert agree().block_size == 32
    assert "block_size 32: preferred by card" in agree().notes
    usual = agree(can(preferred_block_size=16))
    assert usual.block_size == 16 and not [note for note in usual.notes if "block_size" in note]


@pytest.mark.parametrize(
    ("wanted", "dtype", "declared", "on"),
    [
        (None, "fp32", True, True),
        (None, "bf16", True, False),
        (None, "fp32", False, False),
        (True, "bf16", True, True),
        (False, "fp32", True, False),
    ],
)
def test_batch_invariance_is_on_by_default_only_in_fp32_where_declared(wanted, dtype, declared, on):
    features = CAN.features if declared else CAN.features - {"batch_invariant"}
    choice = agree(can(features=features), dtype=dtype, batch_invariant=wanted)
    assert ("batch_invariant" in choice.features) is on


def test_batch_invariance_that_is_not_declared_is_refused_when_asked_for():
    (reason,) = reasons(can(features=frozenset()), batch_invariant=True)
    assert "card does not support batch_invariant=True; accepted: False" in reason


def test_batch_invariance_by_default_yields_to_an_exclusion_and_says_so_but_an_explicit_one_does_not():
    excluded = can(exclusions=(({"feature": "batch_invariant", "kv_dtype": "int8/token_head"}, "no kernel"),))
    choice = agree(excluded, dtype="fp32", kv_dtype="int8/token_head")
    assert "batch_invariant" not in choice.features
    assert [note for note in choice.notes if note.startswith("batch_invariant False")]
    (reason,) = reasons(excluded, dtype="fp32", kv_dtype="int8/token_head", batch_invariant=True)
    assert "feature=batch_invariant, kv_dtype=int8/token_head: no kernel" in reason


def test_features_are_what_layers_need_plus_what_is_required():
    layers = (layer(0), layer(1, window=128))
    assert agree(layers=layers, dtype="bf16", features=frozenset({"sinks"})).features == {"window", "sinks"}


def test_each_missing_feature_names_its_layers():
    layers = tuple(layer(i, softcap=30.0 if i in (1, 2) else None, causal=i != 5) for i in range(6))
    first, second = sorted(reasons(layers=layers))
    assert "feature that layer 5 needs='non_causal'; accepted: batch_invariant, sinks, window" in first
    assert "feature that layers 1-2 needs='softcap'" in second
    (unknown,) = reasons(features=frozenset({"a_feature_of_tomorrow"}))
    assert "feature='a_feature_of_tomorrow'" in unknown


def test_an_unknown_kind_or_execution_counts_as_unsupported():
    (kind,) = reasons(layers=(layer(0), layer(3, kind="mla")))
    assert "kind of layer 3='mla'; accepted: mha" in kind
    (execution,) = reasons(can(execution="graph_of_tomorrow"))
    assert "execution='graph_of_tomorrow'" in execution and "'layer' only" in execution


def test_head_dims_of_keys_and_values_and_the_group_are_checked():
    (dim,) = reasons(layers=(layer(0, v_dim=80), layer(2, v_dim=80)))
    assert "head_dim of layers 0, 2=80; accepted: 64, 128" in dim
    (group,) = reasons(layers=(layer(0, q_heads=9, kv_heads=1),))
    assert "query heads per KV head of layer 0=9; accepted: at most 8" in group
    assert agree(can(max_group=None), layers=(layer(0, q_heads=99, kv_heads=1),)).dtype == "bf16"


@pytest.mark.parametrize(("q_heads", "kv_heads", "group"), [(8, 8, 1), (8, 2, 4), (7, 2, 4), (7, 1, 7)])
def test_group_size_is_the_most_query_heads_that_read_one_kv_head(q_heads, kv_heads, group):
    readers = [h * kv_heads // q_heads for h in range(q_heads)]
    assert max(readers.count(h) for h in set(readers)) == group
    assert group_size(layer(q_heads=q_heads, kv_heads=kv_heads)) == group


def test_all_reasons_come_together():
    wanted = {"dtype": "fp8", "kv_dtype": "int4", "block_size": -1, "features": frozenset({"lse"})}
    found = reasons(layers=(layer(0, k_dim=80, kind="mla"),), batch_invariant=None, **wanted)
    for part in ("dtype='fp8'", "kv_dtype='int4'", "block_size=-1", "feature='lse'", "head_dim of layer 0=80", "'mla'"):
        assert any(part in reason for reason in found), part
    assert all(reason.startswith("backend card ") for reason in found)


EXCLUSION_CASES = [
    ({"dtype": "bf16"}, True),
    ({"dtype": "fp16"}, False),
    ({"dtype": frozenset({"fp16", "bf16"})}, True),
    ({"block_size": (16, 32, 128)}, True),
    ({"block_size": (16, 48, 128)}, False),
    ({"block_size": 32, "head_dim": 128}, True),
    ({"block_size": 16, "head_dim": 128}, False),
    ({"head_dim": 128, "feature": "window"}, False),
    ({"head_dim": 64, "feature": "window"}, True),
    ({"group": (1, 5, 99)}, False),
    ({"group": {2, 4}}, True),
    ({"kind": "mha"}, True),
    ({"dtype": "bf16", "requirement_of_tomorrow": 1}, False),
]


@pytest.mark.parametrize(("pattern", "hit"), EXCLUSION_CASES)
def test_an_exclusion_hits_when_all_of_its_pattern_holds_for_one_layer(pattern, hit):
    layers = (layer(0, window=64), layer(1, k_dim=128))
    limited = can(exclusions=((pattern, "it does not work"),))
    if not hit:
        assert agree(limited, layers=layers).block_size == 32
        return
    (reason,) = reasons(limited, layers=layers)
    assert "it does not work" in reason and "change one of them" in reason


def test_without_layers_exclusions_of_settings_still_hold():
    limited = can(exclusions=(({"block_size": 32}, "broken"), ({"head_dim": 64}, "no layer has it")))
    assert len(reasons(limited, layers=())) == 1


def test_a_backend_that_declares_nothing_is_refused_with_reasons_not_an_exception():
    nothing = Capabilities(dtypes=(), kv_dtypes=(), block_sizes=(), head_dims=(), preferred_block_size=16)
    found = reasons(nothing, block_size=16)
    assert any("declares no dtype" in reason for reason in found)
    assert any("block_size=16; accepted: none" in reason for reason in found)


SIZES = st.one_of(
    st.frozensets(st.integers(1, 200), max_size=4),
    st.tuples(st.integers(1, 64), st.integers(1, 100), st.integers(1, 200)),
)


@given(st.lists(SIZES, max_size=3), st.integers(-5, 200))
def test_accepted_sizes_equal_their_enumeration(alternatives, size):
    every = set()
    for sizes in alternatives:
        every |= (
            sizes if isinstance(sizes, frozenset) else {s for s in range(sizes[1], sizes[2] + 1) if s % sizes[0] == 0}
        )
    assert accepts(alternatives, size) == (size in every)


@given(
    dtype=st.sampled_from([None, "fp32", "bf16", "fp16", "fp8"]),
    checkpoint=st.sampled_from([None, "fp32", "bf16", "fp16"]),
    kv=st.sampled_from([None, "fp32", "int8/token_head", "int4"]),
    size=st.one_of(st.none(), st.integers(-1, 140)),
    invariant=st.sampled_from([None, True, False]),
)
def test_an_explicit_value_is_kept_or_refused_never_replaced(dtype, checkpoint, kv, size, invariant):
    wanted = {"dtype": dtype, "kv_dtype": kv, "block_size": size}
    try:
        choice = agree(**wanted, checkpoint_dtype=checkpoint, batch_invariant=invariant)
    except UnsupportedError as error:
        refused = {name for name, value in wanted.items() if value is not None}
        assert all(any(f" {name}=" in reason for name in refused) for reason in error.reasons)
        return
    assert all(value is None or getattr(choice, name) == value for name, value in wanted.items())
    assert invariant is None or ("batch_invariant" in choice.features) is invariant
    again = agree(**wanted, checkpoint_dtype=checkpoint, batch_invariant=invariant)
    assert choice == again


def test_the_order_of_layers_does_not_change_the_reasons():
    layers = (layer(0, softcap=1.0), layer(1, k_dim=80), layer(2, kind="mla"))
    found = [sorted(reasons(layers=order)) for order in itertools.permutations(layers)]
    assert all(each == found[0] for each in found)
