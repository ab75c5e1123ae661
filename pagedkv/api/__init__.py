"""The contract between pagedkv and a hardware backend: everything a backend may import, and nothing else.

Standard library and numpy only. `docs/contract.md` explains it; `pagedkv/api/backend.py` is the place to start reading.
"""

from pagedkv.api.backend import (
    API_VERSION,
    AttentionBackend,
    Communicator,
    Descriptor,
    Event,
    Plan,
    Pool,
)
from pagedkv.api.errors import (
    BackendUnavailable,
    ContractViolation,
    DeviceError,
    OutOfDeviceMemory,
    UnsupportedError,
)
from pagedkv.api.records import (
    Batch,
    Capabilities,
    DeviceInfo,
    GroupSpec,
    LayerSpec,
    Limits,
    MemoryInfo,
    OpSpec,
    Option,
    PoolCost,
    PoolSpec,
    World,
    needs,
)

__all__ = [
    "API_VERSION",
    "AttentionBackend",
    "BackendUnavailable",
    "Batch",
    "Capabilities",
    "Communicator",
    "ContractViolation",
    "Descriptor",
    "DeviceError",
    "DeviceInfo",
    "Event",
    "GroupSpec",
    "LayerSpec",
    "Limits",
    "MemoryInfo",
    "OpSpec",
    "Option",
    "OutOfDeviceMemory",
    "Plan",
    "Pool",
    "PoolCost",
    "PoolSpec",
    "UnsupportedError",
    "World",
    "needs",
]
