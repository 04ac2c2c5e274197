#!/usr/bin/env bash
# All that can be checked only on a machine with a GPU, in one go:
#
#   conformance  what every transport promises, for cuda, tcp and, where KVFERRY_NIXL names NIXL, for nixl, with the
#                memory of a card
#   bench        real plans of real models through the cuda back end, between two processes on one card: every
#                byte is checked, and the time stands beside that of the card's own copy; hand-offs, as long as the
#                card has room for; packing over nixl and NIXL alone, where NIXL is found (it says so where not); tcp beside
#                plain sockets; what a
#                decode engine's steps lose while loads come in (`kvferry-bench gpu`; `--save FILE` keeps the figures)
#   digest       digests of memory on the card: compared with the host's, and how fast (the example `gpu_digest`)
#   transfer     GPU memory through the nixl back end, every byte checked (tools/check-gpu-transfer.sh)
#   vllm         two vLLM engines on the card, every token checked (tools/check-gpu-vllm.sh)
#
#   tools/check-gpu.sh                all five
#   tools/check-gpu.sh bench [...]    one of them; what follows are its own options
#
# KVFERRY_BENCH        a kvferry-bench program that was built elsewhere; without it, it is built here
# KVFERRY_CONFORMANCE  likewise, the program of the conformance suite
# KVFERRY_GPU_DIGEST   likewise, the example gpu_digest
# KVFERRY_NVRTC        NVRTC's library or its directory, where it is not found by itself
# KVFERRY_GPU_JOBS     how many pairs of vLLM engines run side by side
# Those of the other two parts are in their scripts.
#
# Ends with 0 only if all that was asked for was checked and is right.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! [ -e /dev/nvidiactl ] && ! command -v nvidia-smi >/dev/null; then
  echo "NOT CHECKED: there is no GPU here" >&2
  exit 1
fi

conformance() {
  local what=(cuda:: tcp-gpu:: nixl-gpu::) part unchecked=0
  for part in "${what[@]}"; do
    if [ "$part" = nixl-gpu:: ] && [ -z "${KVFERRY_NIXL:-}" ]; then
      echo "NOT CHECKED: nixl with a card's memory: KVFERRY_NIXL does not name NIXL" >&2
      unchecked=1
      continue
    fi
    if [ -n "${KVFERRY_CONFORMANCE:-}" ]; then
      timeout 580 "$KVFERRY_CONFORMANCE" "$part" "$@" || return
    else
      cargo test -p kvferry-conformance --test conformance -- "$part" "$@" || return
    fi
  done
  return $unchecked
}
bench() {
  local program=${KVFERRY_BENCH:-}
  if [ -z "$program" ]; then
    cargo build --release -p kvferry-bench || return
    program=${CARGO_TARGET_DIR:-target}/release/kvferry-bench
  fi
  timeout 580 "$program" gpu "$@"
}
digest() {
  local program=${KVFERRY_GPU_DIGEST:-}
  if [ -z "$program" ]; then
    cargo build --release -p kvferry-bench --example gpu_digest || return
    program=${CARGO_TARGET_DIR:-target}/release/examples/gpu_digest
  fi
  timeout 300 "$program"
}
transfer() { tools/check-gpu-transfer.sh "$@"; }
vllm() { tools/check-gpu-vllm.sh "$@"; }

case ${1:-all} in
conformance | bench | digest | transfer | vllm) "$@" ;;
all)
  date -u +%Y-%m-%d
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || true
  wrong=()
  for part in conformance bench digest transfer vllm; do
    printf '\n== %s\n' "$part"
    "$part" || wrong+=("$part")
  done
  if [ ${#wrong[@]} -gt 0 ]; then
    echo "FAILED OR NOT CHECKED: ${wrong[*]}" >&2
    exit 1
  fi
  ;;
*)
  echo "there is no part '$1': it is conformance, bench, digest, transfer or vllm" >&2
  exit 2
  ;;
esac
