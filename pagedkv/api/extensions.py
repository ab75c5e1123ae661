"""Protocols of the optional extensions. A backend that declares one answers `extension(name)` with such an object.

    "graph"         GraphExtension   record the calls of a step once, replay them
    "canonical_kv"  CanonicalKV      blocks as bytes that every backend reads the same way

The log-sum-exp has no object: a backend that declares the feature "lse" accepts `extra={"lse": tensor}` in `attend`, a
contiguous float32 tensor [>=T, Hq] of `torch_device`, and writes the natural logarithm of each query's softmax
denominator, a sink included; minus infinity where there is neither a visible key nor a sink. Rows past T are left alone
or finite.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pagedkv.api.backend import Event, Plan, Pool
from pagedkv.api.records import Batch, GroupSpec, Int32, Record

GRAPH_VERSION = (1, 0)
CANONICAL_KV_VERSION = (1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphShape(Record):
    """The fixed size of a static plan: rows, query tokens, the longest context, query tokens of each decode row."""

    rows: int
    tokens: int
    max_ctx: int
    decode_q: int = 1


class Graph(ABC):
    """Recorded calls. It ends with its pools: after their close only `close` may be called."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of device memory that the graph holds."""

    @abstractmethod
    def replay(self) -> None:
        """Enqueue the recorded work again, on the tensors of the recording and the last `refresh` of its plans.

        A backend whose recordings hold host values issues them again here. May wait for the same graph's previous
        replay, and for nothing else.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. Idempotent."""


class GraphExtension(Protocol):
    """Extension "graph": `Capabilities.graph` says for which batches, `max_graphs` how many may be open."""

    def static_plan(self, pool: Pool, group: int, shape: GraphShape) -> Plan:
        """A plan of fixed size, empty until its first `refresh`; it does not count among `limits.plans`."""
        ...

    def refresh(self, plan: Plan, batch: Batch) -> None:
        """Give a static plan another batch in place, ordered after enqueued work.

        The core pads the batch to the shape: rows without a query (context 0), slots -1. The host arrays may be
        overwritten once this returns.
        """
        ...

    def capture(self, fn: Callable[[], None], plans: Sequence[Plan]) -> Graph:
        """Record the work that `fn` enqueues with these static plans. `fn` plans nothing and waits for nothing.

        `fn` may be called once, or again at each replay. Whether its results exist before the first replay is open.
        """
        ...


class CanonicalKV(Protocol):
    """Extension "canonical_kv": the blocks of one sequence as bytes.

    First `canonical_fingerprint(group)`, 32 bytes; then, for each layer that owns bytes by ascending index, the keys
    (as cached, after rope) and the values, each in the order (KV head, token, dim), in the group's KV dtype, little
    endian. Behind the keys and values of a layer follow a quantized KV dtype's scales, float32, of the keys and of the
    values: (KV head, token) where they are made at append, (KV head) where they are bound, in which case an import into
    layers with other ones is a `ContractViolation`. Padding never appears.
    """

    def export(self, pool: Pool, group: int, ids: Int32, lengths: Int32) -> tuple[Event, Any]:
        """The first lengths[i] tokens of each block ids[i], in this order: (event, uint8 array valid once it is done).

        Starts after all compute enqueued so far.
        """
        ...

    def import_(self, pool: Pool, group: int, ids: Int32, lengths: Int32, data: Any) -> Event:
        """Write what `export` gave into blocks; other slots keep their bytes. `data` is read before this returns.

        Raises `ContractViolation` for another fingerprint or size. Later compute does not wait: call `wait`.
        """
        ...


def canonical_fingerprint(group: GroupSpec) -> bytes:
    """32 bytes that say which numbers follow: SHA-256 over KV dtype and the layers that own bytes.

    Block size and query heads do not enter: they change no byte. The KV heads enter as this rank's part of all.
    """
    layers = [
        [layer.index, layer.kind, layer.kv_heads, layer.k_dim, layer.v_dim, layer.kv_head_first, _total(layer)]
        for layer in sorted(group.layers, key=lambda layer: layer.index)
        if layer.kv_of is None
    ]
    return hashlib.sha256(json.dumps(["canonical_kv", *CANONICAL_KV_VERSION, group.kv_dtype, layers]).encode()).digest()


def _total(layer: Any) -> int:
    return int(layer.kv_heads if layer.kv_heads_total is None else layer.kv_heads_total)
