"""The records of the contract: what is gated, what `needs` sees, and how they grow (laws G1 and G3)."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest

from pagedkv import api
from pagedkv.api import (
    Batch,
    Capabilities,
    DeviceInfo,
    GroupSpec,
    LayerSpec,
    Limits,
    MemoryInfo,
    PoolSpec,
    needs,
)
from pagedkv.api.records import Record

RECORDS = [r for r in vars(api).values() if isinstance(r, type) and issubclass(r, Record)]


def layer(**fields: object) -> LayerSpec:
    plain: dict[str, object] = {"index": 0, "q_heads": 4, "kv_heads": 2, "k_dim": 8, "v_dim": 8, "scale": 0.5}
    return LayerSpec(**(plain | fields))  # type: ignore[arg-type]


def pool(*layers: LayerSpec) -> PoolSpec:
    group = GroupSpec(layers=layers, block_size=4, kv_dtype="fp32")
    return PoolSpec(groups=(group,), num_blocks=2, dtype="fp32", limits=Limits(rows=1, tokens=1, context=8))


def batch(**fields: object) -> Batch:
    one = np.array([0, 1], np.int32)
    plain: dict[str, object] = {
        "num_seqs": 1,
        "num_tokens": 1,
        "cu_q": one,
        "ctx_len": one[1:],
        "block_table": np.zeros((2, 2), np.int32),
        "rows": one[1:],
        "max_q": 1,
        "max_ctx": 1,
    }
    return Batch(**(plain | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "feature"),
    [
        ({"causal": False}, "non_causal"),
        ({"window": 4}, "window"),
        ({"softcap": 30.0}, "softcap"),
        ({"sinks": True}, "sinks"),
        ({"alibi": True}, "alibi"),
        ({"kv_of": 0}, "kv_sharing"),
    ],
)
def test_every_gated_field_of_a_layer_needs_its_feature(fields: dict[str, object], feature: str) -> None:
    assert needs(layer(**fields)) == (feature,)
    assert needs(pool(layer(), layer(index=1, **fields))) == (feature,), "records inside records count too"


def test_defaults_and_hints_need_nothing() -> None:
    assert needs(layer(kv_heads_total=8, kv_head_first=2)) == ()
    assert needs(pool(layer())) == ()
    assert needs(batch()) == ()


def test_a_batch_of_several_tokens_a_decode_row_needs_its_feature() -> None:
    assert needs(batch(decode_q=3, num_decode=1)) == ("multi_token_decode",)


def test_every_gated_field_has_a_default() -> None:
    for record in RECORDS:
        for f in dataclasses.fields(record):  # type: ignore[arg-type]
            if "feature" in f.metadata:
                assert f.default is not dataclasses.MISSING, (record.__name__, f.name)


def test_g3_fields_of_a_later_contract_are_dropped_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pagedkv.api"):
        memory = MemoryInfo.of(free=1, total=2, bandwidth=3)
    assert memory == MemoryInfo(free=1, total=2)
    assert "bandwidth" in caplog.text
    assert "MemoryInfo" in caplog.text


def test_of_still_wants_what_is_required() -> None:
    with pytest.raises(TypeError):
        DeviceInfo.of(kind="x")


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.__name__)
def test_records_are_frozen_slotted_and_keyword_only(record: type[Record]) -> None:
    parameters = record.__dataclass_params__  # type: ignore[attr-defined]
    assert parameters.frozen
    assert "__slots__" in vars(record)
    assert all(f.kw_only for f in dataclasses.fields(record))  # type: ignore[arg-type]


def test_records_with_arrays_compare_by_identity() -> None:
    assert batch() != batch()
    assert layer() == layer()


def test_a_backend_needs_at_most_25_names_besides_the_collectives() -> None:
    assert len(api.__all__) <= 25
    assert all(hasattr(api, name) for name in api.__all__)


def test_capabilities_declare_nothing_by_default() -> None:
    bare = Capabilities(
        dtypes=("fp32",),
        kv_dtypes=("fp32",),
        block_sizes=(frozenset({16}),),
        head_dims=((8, 8, 128),),
        preferred_block_size=16,
    )
    assert bare.features == frozenset()
    assert bare.extensions == {}
    assert bare.graph == "none"
