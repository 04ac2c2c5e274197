#!/usr/bin/env bash
# Moves GPU memory from one process to another through the nixl back end, checks every byte, and
# prints the rate as found. Run it on a machine with a GPU.
#
#   tools/check-gpu-transfer.sh [MIB [GPU [PEER_GPU]]]
#
# KVFERRY_NIXL          the NIXL library or the directory its wheel was unpacked into; without it,
#                       what `kvferry nixl install` installed, or the Python environment
# KVFERRY_GPU_TRANSFER  a gpu_transfer program that was built elsewhere; without it, it is built here
#
# With one card, UCX may fall back to emulation in software; the check still passes, and warns.
set -euo pipefail
cd "$(dirname "$0")/.."

program=${KVFERRY_GPU_TRANSFER:-}
if [ -z "$program" ]; then
    cargo build --release -p kvferry-bench --example gpu_transfer
    program=${CARGO_TARGET_DIR:-target}/release/examples/gpu_transfer
fi
exec timeout 300 "$program" "$@"
