"""What a backend implements: a `Descriptor` that its entry point names, and an `AttentionBackend` that it creates.

Laws that hold for every call. Compute enqueued through one instance takes effect in the order of the calls; a
synchronous backend may finish before it returns. Any thread may call, one at a time per instance. No call inside a step
allocates beyond the pool's `fixed` bytes. A call that raises changes no other slot. After `UnsupportedError` and
`OutOfDeviceMemory` the instance is usable; after `DeviceError` only `close` is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pagedkv.api.errors import UnsupportedError
from pagedkv.api.records import (
    Batch,
    Capabilities,
    DeviceInfo,
    Int32,
    MemoryInfo,
    OpSpec,
    Option,
    PoolCost,
    PoolSpec,
    World,
)

API_VERSION = (1, 1)
"""(major, minor) of the contract this package speaks."""

DEFAULT_FRACTION = 0.9
"""The share of total memory that an engine may fill when neither user nor backend says otherwise."""


class Event:
    """The end of some enqueued work. This base class is an event that is already done."""

    def done(self) -> bool:
        """Whether the work has ended; never blocks. Raises the work's `DeviceError`."""
        return True

    def join(self, timeout: float | None = None) -> None:
        """Block the host until the work has ended, at most `timeout` seconds. Raises the work's `DeviceError`."""


class Pool(ABC):
    """The bytes behind block ids 0 .. num_blocks - 1. Block 0, the null block, reads as zero and is never written."""

    spec: PoolSpec

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return self.spec.num_blocks

    @property
    def placement(self) -> str:
        """Where the bytes are: "device" or "host"."""
        return self.spec.placement

    @abstractmethod
    def close(self) -> None:
        """Give the bytes back. Idempotent."""


class Plan:
    """Whatever a backend precomputes for one batch of a group; opaque to the core, dropped after its last `attend`."""


class Communicator(Protocol):
    """Collectives of one group of ranks; each returns its result (possibly its argument), on the compute queue.

    A rank's place in the `group` that `communicator` was given is its rank here: `all_reduce` sums, `all_gather`
    concatenates equal shapes along `dim` in this order, `broadcast` gives the tensor of place `src`.
    """

    def all_reduce(self, tensor: Any) -> Any: ...
    def all_gather(self, tensor: Any, dim: int = -1) -> Any: ...
    def broadcast(self, tensor: Any, src: int = 0) -> Any: ...
    def barrier(self) -> None: ...


class AttentionBackend(ABC):
    """One device's paged attention. Six methods are required; every other one has a default that works."""

    # -- required ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this instance does: pure, and at most what `Descriptor.describe` said of its device."""

    @abstractmethod
    def pool_cost(self, spec: PoolSpec) -> PoolCost:
        """Exact bytes of a pool like `spec` (its `num_blocks` is ignored): pure, touches no device."""

    @abstractmethod
    def alloc_pool(self, spec: PoolSpec) -> Pool:
        """Allocate at most `fixed + num_blocks * per_block` bytes, block 0 zeroed.

        Raises `OutOfDeviceMemory` or `UnsupportedError` with all reasons.
        """

    @abstractmethod
    def plan(self, pool: Pool, group: int, batch: Batch) -> Plan:
        """Prepare one batch. The host arrays may be overwritten once this returns; plans alive stay as they are."""

    @abstractmethod
    def attend(
        self, plan: Any, layer: int, q: Any, k: Any, v: Any, out: Any, *, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Append, then attend, for one layer.

        q [>=T, Hq, Dk], k [A, Hkv, Dk], v [A, Hkv, Dv], out [>=T, Hq, Dv], tensors of `torch_device`. Each token's
        [heads, dim] is contiguous; q, k and v may be slices of one tensor. k = v = None attends only; q = out = None
        appends only. Keys and values are read as stored. Query j of a row with n query tokens stands at
        p = ctx_len - n + j and sees key i iff i < ctx_len, i <= p (causal), i > p - window (windowed).
        s = scale q.k, then softcap tanh(s / softcap) softcap; a sink adds exp(sink) to the denominator.
        A query that sees nothing gives zeros; rows of `out` past T stay finite.
        """

    @abstractmethod
    def copy_blocks(self, src: Pool, dst: Pool, pairs: Int32, *, after: Event | None = None) -> Event:
        """Copy blocks `pairs[:, 0]` of `src` to `pairs[:, 1]` of `dst`, bit for bit, every layer of every group.

        Starts after `after` (None: all compute enqueued so far); later compute does not wait for it. Destinations are
        distinct and not 0; within one pool no id is on both sides. Copying block 0 clears a block.
        """

    # -- optional ------------------------------------------------------------------------------------------------------

    @property
    def torch_device(self) -> str:
        """Where the core creates tensors for q, k, v and out. Optional, defaults to "cpu"."""
        return "cpu"

    def memory(self) -> MemoryInfo:
        """Memory of the device now. Optional, defaults to unknown."""
        return MemoryInfo()

    def reset_peak(self) -> None:
        """Let `MemoryInfo.peak` begin again at what is allocated now. Optional, defaults to nothing; since 1.1."""
        return

    def kv_budget(self, fraction: float | None, reserved: int) -> int | None:
        """Bytes the cache may take, `reserved` bytes of weights and workspace left aside; None when memory is unknown.

        fraction x total - (total - free - reclaimable) - reserved, at least 0. `fraction` None means the user left it
        unset: the backend's own default. Optional, the default fraction is 0.9.
        """
        memory = self.memory()
        if memory.total is None or memory.free is None:
            return None
        used = memory.total - memory.free - (memory.reclaimable or 0)
        share = DEFAULT_FRACTION if fraction is None else fraction
        return max(0, int(share * memory.total) - used - reserved)

    def record(self) -> Event:
        """An event for all compute enqueued so far. Optional, defaults to an event that is done."""
        return Event()

    def wait(self, event: Event) -> None:
        """Let later compute start after `event`; the host need not block. Optional, defaults to joining it."""
        event.join()

    def synchronize(self) -> None:
        """Block until all enqueued work has ended. Optional, defaults to nothing."""
        return

    def close(self) -> None:
        """Wait for enqueued work and free everything. Idempotent. Optional, defaults to nothing."""
        return

    def to_host(self, tensor: Any) -> tuple[Event, Any]:
        """Copy a tensor to the host: (event, numpy array valid once it is done). Optional, defaults to `.numpy()`."""
        return Event(), tensor.detach().cpu().numpy()

    def bind(self, pool: Pool, layer: int, params: Mapping[str, Any]) -> None:
        """Values known only after loading: "sinks" [Hq], "alibi" [Hq], scales; host float32; again after each reload.

        "k_scale" and "v_scale", a number or [Hkv] above 0, where the KV dtype binds scales and the layer owns bytes:
        later appends divide by them, later reads multiply. Required of a backend that declares such a feature or KV
        dtype; the default refuses.
        """
        raise UnsupportedError(f"this backend binds no parameters, got {sorted(params)}")

    def communicator(self, group: Sequence[int]) -> Communicator:
        """Collectives among the world ranks in `group`, equal on each of them, this one included. Ends with `close`.

        All of them create their communicators in the same order. Optional, refused by default.
        """
        raise UnsupportedError("this backend has no collectives")

    def op(self, name: str, spec: OpSpec) -> Callable[..., Any] | None:
        """A faster form of the reference `pagedkv.ops.<name>`, same signature and meaning, or None. Optional.

        What it accepted it computes. An op with weights has `pack(*tensors)`, which may consume them and returns
        packed weights with `nbytes`.
        """
        return None

    def extension(self, name: str) -> Any | None:
        """The object behind a declared extension. Optional, defaults to None."""
        return None


class Descriptor(ABC):
    """What an entry point of the group `pagedkv.backends` names. Its module imports only the standard library and this.

    `name` equals the entry point's. The plugin loads iff `api`'s major equals the core's and `requires_api_minor`
    (default: the minor of `api`) is at most the core's.
    """

    name: str
    api: tuple[int, int]
    requires_api_minor: int | None = None
    options: tuple[Option, ...] = ()

    @abstractmethod
    def probe(self) -> tuple[DeviceInfo, ...]:
        """The devices there are, without opening one, importing a framework, or raising when there is none. 100 ms."""

    @abstractmethod
    def describe(self, device: DeviceInfo) -> Capabilities:
        """The most that an instance on `device` may declare: pure and import-light."""

    @abstractmethod
    def create(self, device: int, options: Mapping[str, Any], world: World) -> AttentionBackend:
        """Make an independent instance on device `index`. Heavy imports happen here. Raises `BackendUnavailable`."""

    def diagnose(self) -> Mapping[str, str]:
        """What `pagedkv doctor` shows for this backend; what a person should change stands under "change".

        Such a line, or one whose name begins so, is a warning; best it holds the command, in backticks. Optional,
        defaults to nothing.
        """
        return {}

    def tool(self, args: Sequence[str]) -> int:
        """The backend's own command. Optional, defaults to having none."""
        raise UnsupportedError(f"backend {self.name!r} has no command of its own")
