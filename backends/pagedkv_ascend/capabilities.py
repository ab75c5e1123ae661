"""What an instance declares, by chip."""

from __future__ import annotations

from pagedkv.api import Capabilities
from pagedkv.api.extensions import GRAPH_VERSION
from pagedkv_ascend.limits import Chip, table

FEATURES = frozenset({"window", "sinks", "kv_sharing", "mixed_batch", "prefix_hit", "lse"})
SOFTCAP = "no attention operator of torch-npu takes a softcap: run this model on backend cpu or cuda"
COLLECTIVES = frozenset({"all_reduce", "all_gather", "broadcast", "barrier"})
PREFERRED = 32
"""The product's default; from 128 on, in steps of 128, prompts are read through the block table too, the fast path."""
MOST_GRAPHS = 16
"""A recording holds a stream for about each layer, and a device has fewer than 2,000: sixteen fit for 110 layers."""


def declared(chip: Chip) -> Capabilities:
    """What an instance on this chip does."""
    most = table()["attention"]
    return Capabilities.of(
        dtypes=chip.dtypes,
        native_dtypes=chip.dtypes,
        kv_dtypes=chip.dtypes,
        block_sizes=(tuple(most["one_query"]["block_size"]["bf16"]),),
        head_dims=(tuple(most["head_dim"]),),
        preferred_block_size=PREFERRED,
        max_group=most["ratio"],
        features=FEATURES,
        placements=frozenset({"device", "host"}),
        extensions={"graph": GRAPH_VERSION},
        graph="decode",
        max_graphs=MOST_GRAPHS,
        graph_default=False,
        async_copy=True,
        collectives=COLLECTIVES,
        exclusions=(
            ({"dtype": "bf16", "kv_dtype": "fp16"}, "the operators read a cache of the queries' dtype"),
            ({"dtype": "fp16", "kv_dtype": "bf16"}, "the operators read a cache of the queries' dtype"),
            ({"feature": "softcap"}, SOFTCAP),
        ),
    )
