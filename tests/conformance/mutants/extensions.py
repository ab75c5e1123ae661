"""Extensions: replays of the wrong batch, bytes in another order, logarithms in another base, ranks mixed up."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.conformance.mutants.table import mutant

# -- graph -------------------------------------------------------------------------------------------------------------


@mutant(
    "refresh", "graph: a replay uses the last refresh", "test_graph.py::test_refresh_between_replays", part="_graphs"
)
def replay_of_a_stale_batch(original: Any, self: Any, plan: Any, batch: Any) -> None:
    """Once it is recorded, a plan keeps its batch."""
    if not any(plan in graph._plans for graph in self._open):
        original(self, plan, batch)


@mutant(
    "refresh",
    "graph: the host arrays may be overwritten once refresh",
    "test_graph.py::test_host_arrays_after_refresh",
    part="_graphs",
)
def refresh_keeps_the_arrays(original: Any, self: Any, plan: Any, batch: Any) -> None:
    """The context lengths of a refresh are read at the replay."""
    original(self, plan, batch)
    object.__setattr__(plan._next, "contexts", batch.ctx_len[: batch.num_seqs])  # it is frozen, and waits in the queue


@mutant(
    "static_plan",
    "graph: two graphs, and two static plans, do not disturb",
    "test_graph.py::test_two_graphs",
    part="_graphs",
)
def static_plans_share_a_buffer(original: Any, self: Any, pool: Any, group: int, shape: Any) -> Any:
    """A pool has one static plan."""
    if not hasattr(pool, "_static"):
        pool._static = original(self, pool, group, shape)
    return pool._static


@mutant(
    "run", "graph: every layer of a recorded step is replayed", "test_graph.py::test_several_layers", part="_graphs"
)
def only_the_first_layer_is_replayed(original: Any, self: Any, fn: Any, plans: Any) -> Any:
    """A replay runs the first call of the recording only."""
    recorded = next((graph for graph in self._open if graph._fn is fn), None)
    if recorded is None:
        return original(self, fn, plans)
    attend, calls = self._backend.attend, iter([True])
    self._backend.attend = lambda *args, **kwargs: attend(*args, **kwargs) if next(calls, False) else None
    try:
        original(self, fn, plans)
    finally:
        del self._backend.attend
    return recorded._calls


@mutant(
    "forget",
    "graph: nbytes is a whole number of bytes; close is idempotent, and a closed graph is not",
    "test_graph.py::test_close",
    part="_graphs",
)
def closed_graph_is_replayed(original: Any, self: Any, graph: Any) -> None:
    """A graph that was closed replays on."""
    original(self, graph)
    graph._closed = False


# -- canonical KV ------------------------------------------------------------------------------------------------------


@mutant(
    "_bytes",
    "canonical_kv: the exported bytes are those of the contract",
    "test_canonical_kv.py::test_exported_bytes",
    part="_canonical",
)
def tokens_before_heads(original: Any, self: Any, pool: Any, group: int, where: Any) -> Any:
    """Numbers are exported in the order (token, head, dim)."""
    right = original(self, pool, group, where)
    parts, start = [right[:32]], 32
    for index in sorted(i for i, layer in pool._layers.items() if layer.group == group and layer.spec.kv_of is None):
        for cache in (pool._layers[index].keys, pool._layers[index].values):
            part = np.ascontiguousarray(cache[where]).reshape(-1).view(np.uint8)
            parts.append(part)
            start += len(part)
    return np.concatenate(parts)


@mutant(
    "_write",
    "canonical_kv: an import changes the slots it names",
    "test_canonical_kv.py::test_import_leaves_others",
    part="_canonical",
)
def import_clears_the_block(original: Any, self: Any, pool: Any, group: int, where: Any, data: Any) -> None:
    """An import clears the whole of each block first."""
    pool._bytes[np.unique(where[0])] = 0
    original(self, pool, group, where, data)


@mutant(
    "_check",
    "canonical_kv: bytes with another fingerprint or size",
    "test_canonical_kv.py::test_foreign_bytes",
    part="_canonical",
)
def fingerprint_is_not_looked_at(original: Any, self: Any, given: Any, pool: Any, group: int, where: Any) -> None:
    """Bytes of other layers are imported if there are as many."""
    from pagedkv.api.extensions import canonical_fingerprint

    fingerprint = np.frombuffer(canonical_fingerprint(pool.spec.groups[group]), np.uint8)
    original(self, np.concatenate([fingerprint, given[32:]]), pool, group, where)


@mutant(
    "import_",
    "canonical_kv: the data may be overwritten once import_ returns",
    "test_canonical_kv.py::test_data_overwritten",
    part="_canonical",
)
def import_reads_late(original: Any, self: Any, pool: Any, group: int, ids: Any, lengths: Any, data: Any) -> Any:
    """The bytes are read when the import runs."""
    given = np.frombuffer(data, np.uint8)
    mine, where = self._where(pool, group, ids, lengths, first=1)
    self._check(given, mine, group, where)
    return self._backend._queues.copy(lambda: self._write(mine, group, where, given[32:]))


@mutant(
    "export",
    "canonical_kv: an export starts after the compute enqueued before it",
    "test_canonical_kv.py::test_export_sees_what_was_enqueued",
    part="_canonical",
)
def export_is_too_early(original: Any, self: Any, pool: Any, group: int, ids: Any, lengths: Any) -> Any:
    """The bytes are those of the moment of the call."""
    mine, where = self._where(pool, group, ids, lengths, first=0)
    data = self._bytes(mine, group, where)
    return original(self, pool, group, ids, lengths)[0], data


# -- log-sum-exp -------------------------------------------------------------------------------------------------------

NATURAL = ("lse: it is the natural log of the softmax denominator", "test_lse.py::test_against_the_oracle")


@mutant("_attend_token", *NATURAL)
def lse_in_base_2(original: Any, self: Any, layer: Any, q: Any, keys: Any, values: Any, distances: Any) -> Any:
    """The logarithm is that of base 2."""
    out, lse = original(self, layer, q, keys, values, distances)
    return out, lse / np.log(2)


@mutant("_attend_token", *NATURAL)
def lse_without_sink(original: Any, self: Any, layer: Any, q: Any, keys: Any, values: Any, distances: Any) -> Any:
    """The sink's part is missing from the logarithm."""
    out, lse = original(self, layer, q, keys, values, distances)
    if not layer.spec.sinks:
        return out, lse
    return out, np.log(np.maximum(np.exp(lse) - np.exp(layer.bound["sinks"]), 0))


@mutant("_attend_token", "lse: minus infinity where a query sees nothing", "test_lse.py::test_nothing_visible")
def lse_of_nothing_is_finite(
    original: Any, self: Any, layer: Any, q: Any, keys: Any, values: Any, distances: Any
) -> Any:
    """The logarithm of an empty sum is a large negative number."""
    out, lse = original(self, layer, q, keys, values, distances)
    return out, np.maximum(lse, -1e30)


# -- collectives -------------------------------------------------------------------------------------------------------


@mutant(
    "communicator",
    "collectives: all_gather concatenates the ranks' tensors along dim",
    "test_collectives.py::test_all_gather",
)
def gathered_in_reverse(original: Any, self: Any, group: Any) -> Any:
    """Ranks are concatenated the last one first."""
    import torch

    made = original(self, group)
    gather = made.all_gather
    made.all_gather = lambda tensor, dim=-1: torch.cat(gather(tensor, dim).chunk(len(group), dim)[::-1], dim)
    return made
