#!/usr/bin/env bash
# Carries out real plans of real models through the cuda back end, between two processes on one card,
# checks every byte, and prints what it took beside the card's own copy. Run it on a machine with a GPU.
#
#   tools/check-gpu-loops.sh [options of `kvferry bench gpu`]
#
# KVFERRY        a kvferry program that was built elsewhere; without it, it is built here
# KVFERRY_NVRTC  NVRTC's library or its directory, where it is not found by itself
set -euo pipefail
cd "$(dirname "$0")/.."

if ! [ -e /dev/nvidiactl ] && ! command -v nvidia-smi >/dev/null; then
    echo "NOT CHECKED: there is no GPU here" >&2
    exit 1
fi
program=${KVFERRY:-}
if [ -z "$program" ]; then
    cargo build --release -p kvferry-cli
    program=${CARGO_TARGET_DIR:-target}/release/kvferry
fi
exec timeout 580 "$program" bench gpu "$@"
