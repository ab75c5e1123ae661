#!/usr/bin/env bash
# Fetch the wheels that a machine with a card, Python 3.12 and no network lacks, into .whl (ignored by git).
# Then: ci/device/gpu.sh there. Tree and wheels stay under 64 MiB together.
set -euo pipefail
cd "$(dirname "$0")/../.."
mkdir -p .whl
grep -qs '^/.whl/$' .git/info/exclude || echo '/.whl/' >> .git/info/exclude
platforms=()
for version in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
  platforms+=(--platform "${version}_x86_64")
done
python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" \
  -d .whl "${@:-stevedore}" gguf setuptools
du -sh .whl
