#!/usr/bin/env bash
# Every test of the project, from a clean clone: installs what is missing (outside the tree, keyed by
# version), and fails when a part cannot be had.
#
#   tools/test.sh          what every change must pass
#   tools/test.sh --all    also the many pairs of real engines that every change need not wait for
set -euo pipefail
cd "$(dirname "$0")/.."

step() {
  local began=$SECONDS
  printf '\n== %s\n' "$*"
  "$@"
  printf '== %s: %d s\n' "$*" $((SECONDS - began))
}

step cargo fmt --all --check
step cargo clippy --workspace --all-targets --locked -- -D warnings
step env RUSTDOCFLAGS=-Dwarnings cargo doc --workspace --no-deps --locked
step python3 tools/check-dependencies.py
step cargo test --workspace --locked
step tools/test-explain.sh
step tools/test-vllm-rules.sh
step tools/test-python.sh "$@"
