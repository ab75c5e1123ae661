"""Made-up certificates."""

from __future__ import annotations

from typing import Any

from pagedkv.api import Capabilities
from pagedkv.conformance.certificate import Case, Certificate
from pagedkv.plugins.probing import capabilities_to_json

CAPABILITIES = Capabilities(
    dtypes=("fp32", "bf16"),
    kv_dtypes=("fp32", "int8/token_head"),
    block_sizes=(frozenset({8, 16}), (32, 32, 128)),
    head_dims=((1, 1, 256),),
    preferred_block_size=16,
    max_group=8,
    features=frozenset({"window", "lse"}),
    extensions={"graph": (1, 0)},
    graph="decode",
    exclusions=(({"dtype": frozenset({"bf16"}), "head_dim": (8, 8, 64), "feature": "window"}, "no kernel | yet"),),
)


def case(number: int, **changes: Any) -> Case:
    fields = {"level": "core", "law": "numerics: agrees", "outcome": "passed", "seconds": 0.25}
    return Case(**{"id": f"test_a.py::test_b[{number}]", **fields, **changes})


def certificate(*cases: Case, **changes: Any) -> Certificate:
    fields: dict[str, Any] = {
        "backend": "mine",
        "distribution": "pagedkv-mine",
        "version": "1.5",
        "api": (1, 0),
        "pagedkv": "0.1.0",
        "device": "a card",
        "options": {"level": 3},
        "machine": {"processor": "some_cpu", "system": "Linux", "machine": "x86_64", "python": "3.12.1"},
        "date": "2026-01-31",
        "capabilities": capabilities_to_json(CAPABILITIES),
        "declared": ("core", "copy"),
        "complete": True,
        "cases": cases or (case(0), case(1, level="copy", law="copy: bits")),
    }
    return Certificate(**fields | changes)
