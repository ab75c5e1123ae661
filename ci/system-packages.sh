#!/usr/bin/env bash
# Debian packages that the tests need. None so far: Python 3.10+, its venv module and make are all.
set -euo pipefail
for tool in python3 make; do
  command -v "$tool" >/dev/null || { echo "missing: $tool" >&2; exit 1; }
done
