"""Every law that is looked at on each call, and the error that names one."""

from __future__ import annotations

import types
from collections.abc import Mapping

from pagedkv.api import ContractViolation

CORE = "the core"

LAWS: Mapping[str, str] = types.MappingProxyType(
    {
        # -- what the core owes the backend --
        "batch arrays": "a batch's arrays are numpy int32 (slots int64) of the documented shapes, and S >= num_seqs",
        "cu_q": "cu_q starts at 0, never falls, and ends at num_tokens",
        "padding rows": "rows from num_seqs on have no query and context 0",
        "context": "a context counts this step's tokens (unless no layer is causal) and fits the table's columns",
        "rows": "every entry of rows is a row of the block table",
        "row 0": "row 0 of the block table is all zero",
        "block table": "block ids are 0..num_blocks - 1",
        "visible blocks": "every key that some layer sees lies in a block other than 0, unless nothing has a block",
        "slots": "a slot is -1 or in a block 1..num_blocks - 1, and no two are the same",
        "slot places": "with a slot for each query token, a slot is the place of a token in some row's context",
        "bounds": "max_q and max_ctx are not less than what the batch holds",
        "num_decode": "the first num_decode rows have 1..decode_q query tokens each",
        "limits": "a plan holds at most the pool's rows, tokens and context",
        "pool spec": "a pool has block 0, limits from 0 on, layer indices of their own, kv_of within its group",
        "group": "a group is an index into the pool's groups",
        "placement": "only a pool with placement 'device' is planned on",
        "G1": "a value, feature or extra that is gated is sent only to a backend that declared its feature",
        "attend forms": "k and v come together, q and out come together; k and v need slots",
        "attend tensors": "tensors have the layer's shapes, the pool's dtype, the backend's device, heads x dim dense",
        "out overlap": "out is contiguous and overlaps none of q, k and v",
        "layer": "a layer is used with plans of its own group",
        "kv_of": "a layer that reads another one's cache gets no k and v",
        "plans alive": "a plan is used before limits.plans later plans of its group are made",
        "other instance": "pools, plans and events are used with the instance that made them",
        "use after close": "nothing is used after its close but close itself",
        "bind": "bound values are those of the layer and its KV dtype, host float32, of their shapes, scales above 0",
        "unbound": "a layer's sinks and alibi are bound before its first attention",
        "copy_blocks": "pairs are int32 [N, 2] in range, destinations distinct, not 0, no id on both sides in a pool",
        "wait": "whoever reads a copy's destination or writes its source or destination waits for its event first",
        "after": "a copy's `after` comes after the compute that wrote its source and used its destination",
        "one at a time": "one thread at a time is inside an instance",
        "static plan": "a static plan is refreshed before its use, with batches padded to its shape",
        "capture": "a captured function uses the static plans it was captured with, plans nothing, waits for nothing",
        "graphs": "batches fit the declared graph level, and no more than max_graphs graphs are open",
        "canonical ids": "ids are blocks, as targets distinct and not 0, lengths 0..block size; int32, equally many",
        # -- what the backend owes the core --
        "results": "every call returns the documented type, with values in their range",
        "capabilities": "capabilities are the same at every call and at most what describe() said",
        "pool_cost": "pool_cost is pure and ignores num_blocks",
        "errors": "only UnsupportedError, OutOfDeviceMemory, DeviceError and ContractViolation are raised",
        "usable": "after UnsupportedError and OutOfDeviceMemory the instance is usable",
        "device error": "after a DeviceError every call but close and what is pure raises it",
        "inputs": "q, k and v are never written",
        "out rows": "attention writes the row of every query, each head of it",
        "padding out": "rows of out past num_tokens are finite",
        "host arrays": "host arrays are not read once the call that got them has returned",
        "events": "done() returns a bool and never goes back to False",
        "close": "close is idempotent",
        "collectives": "a collective's result has the shape and dtype that follow from its argument",
        "canonical bytes": "exported bytes are uint8, of the length that follows, and begin with the fingerprint",
    }
)
"""Law -> what it says."""

_ADVICE = {True: "this is a bug of pagedkv itself, please report it", False: "this is for the backend's author to mend"}


def broken(law: str, who: str, what: str) -> ContractViolation:
    """The error for a broken law: who broke it, what was seen, what the law says."""
    return ContractViolation(f"{who} broke the law {law!r}: {what}. {LAWS[law]}; {_ADVICE[who == CORE]}", law=law)
