#!/usr/bin/env bash
# One call on a machine with an NVIDIA GPU, Python 3.12, torch, Triton and transformers, no network; under 8 minutes.
# Not run yet: no card was at hand when it was written. Wheels that may be missing there: ci/device/prepare.sh.
#
#   OUT=/tmp/out bash ci/device/gpu.sh          everything comes to $OUT, at most 8 files
#
# Each step has a time limit of its own, and one that fails does not keep the next from running. What is timed runs
# alone. Before it, parts of the kit run side by side: they show what is broken early, and compile the kernels, so that
# the whole kit fits into what is left of the time at the end. With one GPU the kit's collectives cannot be reached:
# NCCL wants a GPU of its own for each rank.
set -uo pipefail
cd "$(dirname "$0")/../.."
: "${OUT:?say where the results go: OUT=/tmp/out bash ci/device/gpu.sh}"
SITE=${SITE:-/tmp/pagedkv-site}
LIMIT=${LIMIT:-465}
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONPATH="$SITE" TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$SITE/.triton}"
mkdir -p "$OUT" "$SITE"
failed=0
pagedkv=(python3 -c 'from pagedkv.cli.main import main; main()')

step() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2
  shift 2
  echo "== $name, ${SECONDS} s after the start"
  timeout -k 5 "$limit" "$@" || { echo "== $name ended with $?"; failed=1; }
}

missing() { # those of the wheels whose distribution this machine lacks, and what builds the package, which must be new
  python3 - .whl/*.whl << 'END'
import importlib.metadata, pathlib, sys
for wheel in sys.argv[1:]:
    name = pathlib.Path(wheel).name.split("-")[0]
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        print(wheel)
    else:
        if name == "setuptools":
            print(wheel)
END
}

install() {
  local pip=(python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$SITE") wheels=()
  if compgen -G '.whl/*.whl' > /dev/null; then mapfile -t wheels < <(missing); fi
  if [ "${#wheels[@]}" -gt 0 ]; then step wheels 30 "${pip[@]}" "${wheels[@]}"; fi
  # The kernels for processors are not what is tested: with no compiler for them the package installs without.
  CXX=false step install 60 "${pip[@]}" --no-build-isolation .
}

about() {
  nvidia-smi -L
  python3 -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'
  command -v gcc cc || echo "no C compiler: Triton cannot build its launchers, and every kernel of ours will fail"
}

kit() { # NAME OPTIONS...   one part of the kit, its result in a folder of its own
  local name=$1
  shift
  timeout -k 5 110 "${pagedkv[@]}" certify cuda --json "$SITE/parts/$name.json" "$@" > "$SITE/parts/$name.txt" 2>&1
  echo "kit, $name: $(tail -n 1 "$SITE/parts/$name.txt")"
}

parts() {
  mkdir -p "$SITE/parts"
  for dtype in bf16 fp16 fp32; do kit "numerics-$dtype" -k "test_numerics and $dtype" & done
  kit attend -k "test_attend or test_append or test_batch or test_lse" &
  kit order -k "test_copy or test_graph or test_plans or test_bind or test_pool" &
  kit rest -k "test_prefix or test_invariance or test_engine or test_ops or test_quantized_kv" &
  kit torch --backend-option kernels=torch -k "test_numerics or test_attend or test_copy or test_graph" &
  wait
}

gathered() { # what the parts said, in one file
  python3 - "$SITE/parts" << 'END' > "$OUT/parts.json"
import json, pathlib, sys
found = {}
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    cases = [case for law in json.loads(path.read_text())["laws"] for case in law["cases"]]
    others = [case for case in cases if case["outcome"] != "passed"]
    found[path.stem] = {"passed": len(cases) - len(others), "others": others}
print(json.dumps(found, indent=1))
END
}

run() {
  install
  step about 30 bash -c "$(declare -f about); about"
  step doctor 45 "${pagedkv[@]}" doctor --backend cuda --json
  echo "== parts of the kit, ${SECONDS} s after the start"
  parts
  gathered
  step kernels 80 python3 ci/device/measure.py --backend cuda --flex --output "$OUT/kernels.json"
  step engine 80 python3 ci/device/engine.py ci/device/llama-3.2-1b.json --backend cuda --output "$OUT/engine.json"
  step engine-8b 50 python3 ci/device/engine.py ci/device/llama-3.1-8b.json --layers 8 --batch-sizes 1,32 \
    --backend cuda --output "$OUT/engine-8b.json"
  if python3 -c 'import matplotlib' 2> /dev/null; then
    step plot 20 python3 ci/device/plot.py "$OUT/kernels.json" "$OUT/engine.json" "$OUT/figures.png"
  else
    echo "== plot left out, matplotlib is not here: python ci/device/plot.py kernels.json engine.json figures.png"
  fi
  step certify $((LIMIT - SECONDS > 30 ? LIMIT - SECONDS : 30)) "${pagedkv[@]}" certify cuda --json "$OUT/cuda.json" -q
  return "$failed"
}

run 2>&1 | tee "$OUT/log.txt" # no process substitution: `wait` would wait for it, and it for us
failed=${PIPESTATUS[0]}
ls -l "$OUT"
exit "$failed"
