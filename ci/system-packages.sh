#!/usr/bin/env bash
# Debian packages that the tests need besides Python 3.10+, its venv module and make: a C++ compiler for the kernels.
set -euo pipefail
for tool in python3 make; do
  command -v "$tool" >/dev/null || { echo "missing: $tool" >&2; exit 1; }
done
if ! command -v g++ >/dev/null; then
  apt-get update -q && apt-get install -q -y --no-install-recommends g++
fi
