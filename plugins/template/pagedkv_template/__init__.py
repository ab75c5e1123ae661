"""What pagedkv reads before it chooses this backend; light, as listing the backends imports it too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedkv.api import AttentionBackend, BackendUnavailable, Capabilities, Descriptor, DeviceInfo, World

# What is not declared is refused, never tried: this backend has no "alibi", and says so by leaving it out.
LAYERS = {"window", "softcap", "sinks", "non_causal", "kv_sharing"}
BATCHES = {"mixed_batch", "prefix_hit", "multi_token_decode"}
PROMISES = {"nan_safe", "deterministic"}  # no "batch_invariant": that takes matrix products of its own, see `op`


class TemplateDescriptor(Descriptor):
    """The entry point: the backend's name, the contract it was written for, the devices it sees."""

    name = "template"
    api = (1, 0)

    def probe(self) -> tuple[DeviceInfo, ...]:
        """One device. Score 0 without a reason: usable, but only when it is asked for by name."""
        return (DeviceInfo.of(index=0, kind="numpy, one query at a time", unified=True, score=0, reason=""),)

    def describe(self, device: DeviceInfo) -> Capabilities:
        """Built with `of`, which drops and reports a field that an older core does not know."""
        return Capabilities.of(
            dtypes=("fp32", "fp16"),  # of q, k, v and out, the preferred first
            kv_dtypes=("fp32", "fp16"),
            block_sizes=((1, 1, 1024),),  # alternatives, each (multiple of, least, most) or a set of sizes
            head_dims=((1, 1, 1024),),
            preferred_block_size=16,
            features=frozenset(LAYERS | BATCHES | PROMISES),
        )

    def create(self, device: int, options: Mapping[str, Any], world: World) -> AttentionBackend:
        if device != 0:
            raise BackendUnavailable(f"the template has device 0 only, not {device}; leave the device unset")
        from pagedkv_template.backend import TemplateBackend  # drivers and frameworks are imported here, no earlier

        return TemplateBackend(self.describe(self.probe()[0]))
