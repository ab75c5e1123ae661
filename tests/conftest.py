"""For all tests: they send Ctrl-C to commands, which a shell's background job would have its children ignore."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
