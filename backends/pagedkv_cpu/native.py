"""The kernels written in C++ (`csrc/`), loaded through their C interface."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping
from pathlib import Path

VERSION = 3
"""The version of the C interface that this module speaks."""
LIBRARY = Path(__file__).with_name("libpagedkv_cpu.so")
SOURCES = Path(__file__).with_name("csrc")
ISAS = ("auto", "generic", "avx2", "avx512", "avx512_vnni", "avx512_bf16")
DTYPES: Mapping[str, int] = {"fp32": 0, "bf16": 1, "fp16": 2}
FORMATS: Mapping[str, int] = {"Q4_0": 0, "Q4_1": 1, "Q8_0": 2}
WITHOUT = "2 to 5 times slower"
"""What torch alone costs: 134 instead of 278 tokens a second for 32 requests, 19 instead of 98 for one, on the demo
model with its default weights (`docs/performance.md`: the results, and those before native kernels)."""
PLAIN: Mapping[str, int] = {"bf16": 3, "fp16": 4}
"""The dtypes whose weights are packed as they are, and the format that stands for it."""

Address = ctypes.c_void_p
Int = ctypes.c_int32
Long = ctypes.c_int64


class LayerStruct(ctypes.Structure):
    """`pkv_layer`."""

    _fields_ = [
        ("keys", Address),
        ("values", Address),
        ("sinks", Address),
        ("slopes", Address),
        ("slots", Long),
        ("q_heads", Int),
        ("kv_heads", Int),
        ("k_dim", Int),
        ("v_dim", Int),
        ("k_width", Int),
        ("v_width", Int),
        ("kv_dtype", Int),
        ("dtype", Int),
        ("causal", Int),
        ("window", Int),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    ]


class BatchStruct(ctypes.Structure):
    """`pkv_batch`."""

    _fields_ = [
        ("cu_q", Address),
        ("ctx_len", Address),
        ("table", Address),
        ("slots", Address),
        ("table_stride", Long),
        ("num_slots", Long),
        ("num_seqs", Int),
        ("num_tokens", Int),
        ("block_size", Int),
    ]


_SIGNATURES: Mapping[str, tuple[object, tuple[object, ...]]] = {
    "pkv_version": (ctypes.c_int, ()),
    "pkv_open": (Address, (ctypes.c_char_p, ctypes.c_int)),
    "pkv_close": (None, (Address,)),
    "pkv_isa": (ctypes.c_char_p, (Address,)),
    "pkv_copy": (None, (Address, Long, Address, Long, Long, Long, Address, Long)),
    "pkv_append": (None, (Address, Address, Address, Address, Long, Address, Long)),
    "pkv_attend_work": (Long, (Address, Long, Long, Long, Int)),
    "pkv_attend": (None, (Address, Address, Address, Address, Long, Address, Address, Address)),
    "pkv_packed_bytes": (Long, (Int, Long, Long)),
    "pkv_pack": (None, (Address, Int, Long, Long, Address, Address)),
    "pkv_linear_work": (Long, (Int, Long, Long)),
    "pkv_linear": (None, (Address, Int, Long, Long, Long, Address, Address, Address, Address, Address)),
    "pkv_rows": (None, (Address, Int, Long, Long, Address, Address, Address)),
    "pkv_add_rms_norm": (None, (Address, Int, Int, Long, Long, Address, Address, Address, ctypes.c_float, Address)),
    "pkv_rope": (None, (Address, Int, Long, Int, Int, Int, Address, Long, Address, Long, Long, Address, Address)),
    "pkv_gated": (None, (Address, Int, Int, Long, Long, Address, Address)),
}


class Kernels:
    """The library on one instruction set and number of threads. Every `pkv_` function is an attribute without prefix.

    Raises `OSError` with one sentence where the library is missing, of another version, or lacks the instruction set.
    """

    def __init__(self, isa: str = "auto", threads: int = 1) -> None:
        library = _library()
        self.context = library.pkv_open(isa.encode(), threads)
        if not self.context:
            raise OSError(f"this processor has no {isa}, or the kernels were built without it")
        self._end = weakref.finalize(self, library.pkv_close, self.context)
        self.isa: str = library.pkv_isa(self.context).decode()
        self.copy = library.pkv_copy
        self.append = library.pkv_append
        self.attend = library.pkv_attend
        self.attend_work = library.pkv_attend_work
        self.packed_bytes = library.pkv_packed_bytes
        self.pack = library.pkv_pack
        self.linear_work = library.pkv_linear_work
        self.linear = library.pkv_linear
        self.rows = library.pkv_rows
        self.add_rms_norm = library.pkv_add_rms_norm
        self.rope = library.pkv_rope
        self.gated = library.pkv_gated


def why_missing() -> str | None:
    """What keeps the kernels from being used here, in one sentence; None where nothing does. Loads the library."""
    try:
        _library()
    except OSError as error:
        return str(error)
    return None


def _library() -> ctypes.CDLL:
    if not LIBRARY.exists():
        raise OSError("the kernels were not built: install a C++ compiler, then pagedkv again (pip install -e . here)")
    library = ctypes.CDLL(str(LIBRARY))
    if (found := library.pkv_version()) != VERSION:  # before a name is looked up that another version may lack
        raise OSError(f"the built kernels have version {found}, this package needs {VERSION}: install pagedkv again")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, list(arguments)
    return library
