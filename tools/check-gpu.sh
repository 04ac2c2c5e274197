#!/usr/bin/env bash
# All that can be checked only on a machine with a GPU, in one go:
#
#   cuda       real plans of real models through the cuda back end, between two processes on one card: every
#              byte is checked, and the time stands beside that of the card's own copy (`kvferry bench gpu`)
#   transfer   GPU memory through the nixl back end, every byte checked (tools/check-gpu-transfer.sh)
#   vllm       two vLLM engines on the card, every token checked (tools/check-gpu-vllm.sh)
#
#   tools/check-gpu.sh                all three
#   tools/check-gpu.sh cuda [...]     one of them; what follows are its own options
#
# KVFERRY        a kvferry program that was built elsewhere; without it, it is built here
# KVFERRY_NVRTC  NVRTC's library or its directory, where it is not found by itself
# Those of the other two parts are in their scripts.
#
# Ends with 0 only if all that was asked for was checked and is right.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! [ -e /dev/nvidiactl ] && ! command -v nvidia-smi >/dev/null; then
  echo "NOT CHECKED: there is no GPU here" >&2
  exit 1
fi

cuda() {
  local program=${KVFERRY:-}
  if [ -z "$program" ]; then
    cargo build --release -p kvferry-cli || return
    program=${CARGO_TARGET_DIR:-target}/release/kvferry
  fi
  timeout 580 "$program" bench gpu "$@"
}
transfer() { tools/check-gpu-transfer.sh "$@"; }
vllm() { tools/check-gpu-vllm.sh "$@"; }

case ${1:-all} in
cuda | transfer | vllm) "$@" ;;
all)
  date -u +%Y-%m-%d
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || true
  wrong=()
  for part in cuda transfer vllm; do
    printf '\n== %s\n' "$part"
    "$part" || wrong+=("$part")
  done
  if [ ${#wrong[@]} -gt 0 ]; then
    echo "FAILED OR NOT CHECKED: ${wrong[*]}" >&2
    exit 1
  fi
  ;;
*)
  echo "there is no part '$1': it is cuda, transfer or vllm" >&2
  exit 2
  ;;
esac
