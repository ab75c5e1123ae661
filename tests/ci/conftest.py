"""The comparison's modules import each other as scripts beside each other do."""

import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "ci" / "bench"
sys.path[:0] = [str(BENCH), str(BENCH / "peers")]
