#!/usr/bin/env bash
# Every test of the project, from a clean clone: installs what is missing (outside the tree, keyed by
# version), and fails when a part cannot be had.
#
#   tools/test.sh          what every change must pass
#   tools/test.sh --all    also the many pairs of real engines that every change need not wait for, those of
#                          different versions of vLLM, and the wheel and the crates as they are published
#
# First what is fast, then what is built, then two lanes side by side: the Rust tests, and the Python ones,
# whose engines spend much of their time starting and waiting. Cargo is always given the whole workspace,
# and `.cargo/config.toml` fixes what pyo3 is built for: so that nothing is built twice with other features.
set -euo pipefail
cd "$(dirname "$0")/.."
began=$SECONDS
. tools/lanes.sh
# How long everything takes is kept for this checkout, and what has become much slower is named at the end.
durations="${XDG_CACHE_HOME:-$HOME/.cache}/kvferry/durations/$(printf '%s' "$PWD" | sha256sum | cut -c1-12)"
mkdir -p "$durations"
export KVFERRY_DURATIONS="$durations/$(date +%Y%m%d-%H%M%S).jsonl"

step() {
  local began=$SECONDS
  printf '\n== %s\n' "$*"
  # `set -e` does not reach into a command that somebody asks the outcome of.
  "$@" || return
  printf '== %s: %d s\n' "$*" $((SECONDS - began))
  printf '{"name": "== %s", "seconds": %d}\n' "$*" $((SECONDS - began)) >>"$KVFERRY_DURATIONS"
}

rust_tests() {
  # The environment is there by now, and NVRTC in it: the GPU kernel must compile.
  # More threads than cores: many of these tests wait.
  step env KVFERRY_REQUIRE_NVRTC=1 RUST_TEST_THREADS=6 cargo test --workspace --locked --no-fail-fast
  step env RUSTDOCFLAGS=-Dwarnings cargo doc --workspace --no-deps --locked
  step tools/test-explain.sh
  step tools/test-docs.sh
  step tools/test-deploy.sh
}

step cargo fmt --all --check
step python3 tools/check-dependencies.py
step python3 tools/circles.py
# On first use this downloads gigabytes, which keeps no core busy.
lane environment tools/vllm-env.sh
step cargo clippy --workspace --all-targets --locked -- -D warnings
step cargo test --workspace --locked --no-run
if ! wait "${lanes[0]}"; then
  cat "$logs/environment"
  exit 1
fi

lane rust rust_tests
failed=0
if [ "${1:-}" = --all ]; then
  step tools/test-wheel.sh || failed=1
fi
step tools/test-vllm-rules.sh || failed=1
step tools/test-python.sh "$@" || failed=1
if [ "${1:-}" = --all ]; then
  step tools/test-versions.sh || failed=1
fi
wait "${lanes[1]}" || failed=1
printf '\n== Meanwhile, the Rust tests\n'
cat "$logs/rust"
printf '\n== How long it took\n'
python3 tools/durations.py "$durations"
printf '\n== %s in %d s\n' "$([ $failed = 0 ] && echo "all tests passed" || echo "FAILED (see above)")" $((SECONDS - began))
exit $failed
