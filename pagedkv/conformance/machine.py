"""What a certificate or a figure was made on."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import psutil


def processor() -> str:
    """The processor's name; the machine's type where the system gives none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:  # only Linux has the file
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")]
    return names[0] if names and names[0] else platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    own = psutil.Process()
    return len(own.cpu_affinity()) if hasattr(own, "cpu_affinity") else psutil.cpu_count() or 1


def surroundings() -> dict[str, Any]:
    """Processor, system and versions, as JSON values; torch's only if something has loaded it."""
    versions: dict[str, Any] = {
        name: str(sys.modules[name].__version__) for name in ("numpy", "torch") if name in sys.modules
    }
    return {
        "processor": processor(),
        "cores": cores(),
        "system": platform.system(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        **versions,
        "checked": os.environ.get("PAGEDKV_CHECK", "").strip() not in ("", "0"),
    }
