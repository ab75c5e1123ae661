"""What is declared and not done, done and not declared, refused in the wrong way, or loaded too early."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

from pagedkv.api import UnsupportedError
from tests.conformance.mutants.table import mutant

# -- honesty -----------------------------------------------------------------------------------------------------------


@mutant(
    "_reasons",
    "honesty: undeclared window is refused",
    "test_honesty.py::test_undeclared_layer_field",
    without="window",
)
def undeclared_window_is_accepted(original: Any, self: Any, spec: Any) -> list[str]:
    """A feature that works is not declared, and accepted all the same."""
    return [reason for reason in original(self, spec) if "'window'" not in reason]


@mutant(
    "_undeclared",
    "honesty: undeclared alibi is refused",
    "test_honesty.py::test_undeclared_layer_field",
    base="template",
)
def undeclared_alibi_is_accepted(original: Any, self: Any, spec: Any) -> list[str]:
    """A feature that does not work is accepted."""
    return [reason for reason in original(self, spec) if "'alibi'" not in reason]


@mutant(
    "alloc_pool",
    "honesty: undeclared softcap is refused",
    "test_honesty.py::test_undeclared_layer_field",
    without="softcap",
)
def undeclared_softcap_is_approximated(original: Any, self: Any, spec: Any) -> Any:
    """A feature that is not declared is left out of the layers that ask for it."""
    plain = [
        dataclasses.replace(group, layers=tuple(dataclasses.replace(layer, softcap=None) for layer in group.layers))
        for group in spec.groups
    ]
    return original(self, dataclasses.replace(spec, groups=tuple(plain)))


@mutant(
    "_undeclared",
    "honesty: a value that is not declared is refused",
    "test_honesty.py::test_undeclared_value",
    base="template",
)
def undeclared_placement_is_accepted(original: Any, self: Any, spec: Any) -> list[str]:
    """Pools of any placement are made, all of them on the device."""
    return [reason for reason in original(self, spec) if not reason.startswith("placement")]


@mutant("_lse_of", "honesty: undeclared lse is refused", "test_honesty.py::test_undeclared_lse", without="lse")
def undeclared_lse_is_ignored(original: Any, self: Any, extra: Any, layer: Any, staged: Any, q: Any) -> Any:
    """What attend does not know in `extra` is ignored."""
    return None


@mutant(
    "_checked",
    "honesty: undeclared multi_token_decode is refused",
    "test_honesty.py::test_undeclared_batch_field",
    without="multi_token_decode",
)
def undeclared_batch_field_is_accepted(original: Any, self: Any, pool: Any, group: int, batch: Any) -> Any:
    """A gated field of a batch is not looked at."""
    return original(self, pool, group, dataclasses.replace(batch, decode_q=1))


@mutant("_reasons", "growth: a feature that is required and unknown is refused", "test_growth.py::test_unknown_feature")
def feature_of_tomorrow_is_accepted(original: Any, self: Any, spec: Any) -> list[str]:
    """Features with unknown names are ignored."""
    return [reason for reason in original(self, spec) if not reason.startswith("feature '")]


@mutant("_reasons", "honesty: every declared dtype, KV dtype, placement", "test_honesty.py::test_declared_values")
def declared_dtype_is_refused(original: Any, self: Any, spec: Any) -> list[str]:
    """A declared KV dtype is refused."""
    return original(self, spec) + ["no kernel for bf16" for group in spec.groups if group.kv_dtype == "bf16"]


@mutant(
    "extension", "honesty: extension() answers exactly for what", "test_honesty.py::test_extensions", without="graph"
)
def undeclared_extension_answers(original: Any, self: Any, name: str) -> Any:
    """An extension that is not declared is there."""
    return self._graphs if name == "graph" else original(self, name)


@mutant("op", "ops: an attribute that an op does not know is declined", "test_ops.py::test_unknown_attribute[linear]")
def op_ignores_attributes(original: Any, self: Any, name: str, spec: Any) -> Any:
    """An op is given whatever its attributes ask for."""
    return original(self, name, dataclasses.replace(spec, attributes={}))


@mutant(
    "op",
    "ops: an op that the backend gives computes what its reference",
    "test_ops.py::test_against_the_reference[linear]",
)
def op_leaves_out_the_bias(original: Any, self: Any, name: str, spec: Any) -> Any:
    """A linear layer does not add its bias."""
    made = original(self, name, spec)
    if name == "linear" and made is not None:
        pack = type(made).pack
        made.pack = lambda weight, bias=None: pack(made, weight)
    return made


@mutant("op", "ops: greedy gives the lowest of the most probable", "test_ops.py::test_greedy")
def greedy_takes_the_last_of_equals(original: Any, self: Any, name: str, spec: Any) -> Any:
    """Of equal logits the highest id is taken."""
    made = original(self, name, spec)
    if name != "greedy" or made is None:
        return made

    def last(logits: Any) -> Any:
        ids = made(logits.flip(-1))
        return ids.where(ids < 0, logits.shape[1] - 1 - ids)

    return last


@mutant("op", "ops: sample cuts by top-k and top-p", "test_ops.py::test_sample")
def sample_cuts_before_temperature(original: Any, self: Any, name: str, spec: Any) -> Any:
    """The share of top-p is taken of the model's own probabilities, as if the temperature were 1."""
    made = original(self, name, spec)
    if name != "sample" or made is None:
        return made

    def early(logits: Any, numbers: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
        wide = logits.double()
        share = wide.softmax(-1).sort(dim=-1, descending=True).values.cumsum(-1)
        fewest = (share < top_p.double()[:, None]).sum(-1) + 1
        return made(logits, numbers, temperature, top_k.minimum(fewest).to(top_k.dtype), top_p.new_ones(len(top_p)))

    return early


@mutant("op", "ops: a sampled id depends on its own row", "test_ops.py::test_sample_alone_and_in_company")
def sample_numbers_are_shared(original: Any, self: Any, name: str, spec: Any) -> Any:
    """The numbers of a batch are handed out in reverse."""
    made = original(self, name, spec)
    if name != "sample" or made is None:
        return made
    return lambda logits, numbers, *rest: made(logits, numbers.flip(0), *rest)


# -- refusals ----------------------------------------------------------------------------------------------------------


@mutant("_refuse", "honesty: a refusal gives all reasons at once", "test_honesty.py::test_all_reasons")
def only_the_first_reason(original: Any, self: Any, reasons: list[str]) -> None:
    """A refusal has one reason."""
    original(self, reasons[:1])


@mutant("_refuse", "honesty: a value that is not declared is refused", "test_honesty.py::test_undeclared_value")
def refused_with_another_type(original: Any, self: Any, reasons: list[str]) -> None:
    """A refusal is a NotImplementedError."""
    try:
        original(self, reasons)
    except UnsupportedError as error:
        raise NotImplementedError(str(error)) from error


@mutant("plan", "errors: a batch beyond the pool's limits is a ContractViolation", "test_errors.py::test_beyond_limits")
def limits_are_not_looked_at(original: Any, self: Any, pool: Any, group: int, batch: Any) -> Any:
    """A plan may be larger than what the pool was made for."""
    limits = pool.spec.limits
    pool.spec = dataclasses.replace(pool.spec, limits=dataclasses.replace(limits, rows=99, tokens=999, context=9999))
    try:
        return original(self, pool, group, batch)
    finally:
        pool.spec = dataclasses.replace(pool.spec, limits=limits)


@mutant("alloc_pool", "errors: a pool larger than memory is OutOfDeviceMemory", "test_errors.py::test_out_of_memory")
def out_of_memory_is_a_memory_error(original: Any, self: Any, spec: Any) -> Any:
    """A pool that does not fit is Python's own MemoryError."""
    from pagedkv.api import OutOfDeviceMemory

    try:
        return original(self, spec)
    except OutOfDeviceMemory as error:
        raise MemoryError(str(error)) from error


# -- lives -------------------------------------------------------------------------------------------------------------


@mutant(
    "close",
    "errors: any work of an instance after its close is a ContractViolation; close is idempotent",
    "test_errors.py::test_backend_after_close",
)
def close_is_not_idempotent(original: Any, self: Any) -> None:
    """Closing twice is an error."""
    from pagedkv.api import ContractViolation

    if self._closed:
        raise ContractViolation("this backend was closed", law="use after close")
    original(self)


@mutant("_begin", "errors: any work of an instance after its close", "test_errors.py::test_backend_after_close")
def usable_after_close(original: Any, self: Any, unrecordable: str = "") -> None:
    """Calls after close are not refused."""
    closed, self._closed = self._closed, False
    original(self, unrecordable)
    self._closed = closed


_shared: weakref.WeakSet[Any] = weakref.WeakSet()


@mutant("alloc_pool", "instances: two of one process are independent", "test_pool.py::test_two_instances")
def close_of_one_closes_all(original: Any, self: Any, spec: Any) -> Any:
    """All instances keep their pools in one list, and close what is in it."""
    self._pools = _shared
    return original(self, spec)


@mutant(
    "capabilities",
    "loading: capabilities() is pure, and at most what",
    "test_loading.py::test_capabilities_within_offer",
)
def more_than_described(original: Any, self: Any) -> Any:
    """An instance declares a feature that its descriptor did not offer."""
    made = original(self)
    return dataclasses.replace(made, features=made.features | {"state"})


# -- loading -----------------------------------------------------------------------------------------------------------


@mutant("probe", "loading: probe() opens no device", "test_loading.py::test_probe_opens_no_device", part="descriptor")
def probe_opens_a_device(original: Any, self: Any) -> Any:
    """Probing opens a device file."""
    with open("/dev/full", "rb"):
        return original(self)


@mutant("probe", "loading: probe() loads no framework", "test_loading.py::test_probe_is_light", part="descriptor")
def probe_loads_a_framework(original: Any, self: Any) -> Any:
    """Probing asks a framework for the devices."""
    import torch

    return original(self) if torch.get_num_threads() else ()


@mutant(
    "__init__", "loading: the descriptor's module imports only", "test_loading.py::test_import_is_light", part="module"
)
def descriptor_imports_a_framework(original: Any, self: Any) -> None:
    """Importing the descriptor's module loads a framework: see heavy.py."""
