#!/bin/bash
# Trains all families side by side on one GPU: tools/train/all.sh FOLDER [options of train.py]
set -eu
here=$(dirname "$(realpath "$0")")
folder=$1
shift
mkdir -p "$folder"
# Small kernels of several processes run at the same time then.
export CUDA_MPS_PIPE_DIRECTORY=$(mktemp -d) CUDA_MPS_LOG_DIRECTORY=$(mktemp -d)
if nvidia-cuda-mps-control -d; then
    trap 'echo quit | nvidia-cuda-mps-control' EXIT
else
    unset CUDA_MPS_PIPE_DIRECTORY
fi
export OMP_NUM_THREADS=2 HF_HUB_OFFLINE=1
for family in ${FAMILIES:-nemotron-h falcon-h1 qwen3.5 kimi-linear lfm2 gemma3 deepseek}; do
    python3 "$here/train.py" "$family" "$folder" "$@" >"$folder/$family.log" 2>&1 &
done
wait
grep -hE "float32|bfloat16|Error" "$folder"/*.log
