"""The law checker, `PAGEDKV_CHECK=1`: any backend in a wrapper that names the law which a call breaks.

laws        the table of laws, and the error that names one
guard       who is inside an instance, closed or lost, what it may raise
batch       the laws of a batch, what it reads and writes; copies of host arrays
order       which work comes before which: waits, `after`
arguments, results, capabilities, tensors   the other laws of the core and of the backend
objects, extensions, backend   what stands in place of the backend's own

Standard library and numpy; tensors are whatever has a shape, strides and an address.
"""

from pagedkv.checking.backend import CheckedBackend, check
from pagedkv.checking.capabilities import exceeds
from pagedkv.checking.laws import LAWS

__all__ = ["LAWS", "CheckedBackend", "check", "exceeds"]
