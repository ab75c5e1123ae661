#!/usr/bin/env bash
# Fetch the wheels that a machine with a card, Python 3.12 and no network may lack, into .whl (ignored by git).
# Then: ci/device/gpu.sh there, which installs those that are missing. Tree and wheels stay under 64 MiB together.
set -euo pipefail
cd "$(dirname "$0")/../.."
mkdir -p .whl
grep -qs '^/.whl/$' .git/info/exclude || echo '/.whl/' >> .git/info/exclude
platforms=()
for version in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
  platforms+=(--platform "${version}_x86_64")
done
# What pagedkv, its kit and its CUDA backend import besides torch, Triton, transformers and what those bring.
wheels=(stevedore gguf setuptools click rich markdown-it-py mdurl pygments psutil jinja2 markupsafe packaging
  pytest iniconfig pluggy nvidia-ml-py requests urllib3 idna certifi charset-normalizer)
"${PYTHON:-python3}" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
  "${platforms[@]}" -d .whl "${wheels[@]}" "$@"
kib=$(($(du -sk .whl | cut -f 1) + $(git ls-files -z | du -sck --files0-from=- | tail -n 1 | cut -f 1)))
echo "tree and wheels together: $((kib / 1024)) MiB"
if [ "$kib" -gt $((64 * 1024)) ]; then
  echo "that is more than 64 MiB: leave wheels out" >&2
  exit 1
fi
