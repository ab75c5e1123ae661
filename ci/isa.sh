#!/usr/bin/env bash
# `make isa`: installs what is missing of Debian's emulators and the compiler for aarch64, then runs ci/isa.
# Not a part of `make test`, which runs the cheap half of it (tests/backends/cpu/test_cpp.py).
set -euo pipefail
cd "$(dirname "$0")/.."
missing=()
for pair in g++:g++ objdump:binutils qemu-x86_64:qemu-user aarch64-linux-gnu-g++:g++-aarch64-linux-gnu; do
  command -v "${pair%%:*}" >/dev/null || missing+=("${pair#*:}")
done
[ -e /usr/include/simde ] || missing+=(libsimde-dev)
if [ ${#missing[@]} -gt 0 ]; then
  apt-get update -q && apt-get install -q -y --no-install-recommends "${missing[@]}"
fi
exec "${PYTHON:-.venv/bin/python}" -m ci.isa
