#!/usr/bin/env bash
# What one wants to know every few minutes: formatting; lints of the crates that changed and of those that use them;
# the tests of those that changed, without the transports' conformance suite; the Python tests that need neither vLLM nor
# torch; and the links in the documents. `tools/test.sh` decides.
#
#   tools/quick.sh [BASE]    what differs from the commit BASE, committed or not; else from where the branch left main
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/lanes.sh
numpy=2.3.5 pytest=9.2.0
began=$SECONDS
base=${1:-$(git merge-base HEAD origin/main 2>/dev/null || git merge-base HEAD main 2>/dev/null || echo HEAD)}

cargo fmt --all --check
lane documents tools/test-docs.sh

# The package as it lies there, with the extension module beside it: nothing is installed.
cargo build --quiet --locked --package kvferry-python
metadata=$(cargo metadata --format-version 1 --no-deps --locked)
target=$(python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])' <<<"$metadata")
package=$target/unit
rm -rf "$package"
mkdir "$package"
cp -R python/kvferry "$package"
cp "$target/debug/libkvferry_python.so" "$package/kvferry/_core.abi3.so"

unit_tests() {
  local root="${XDG_CACHE_HOME:-$HOME/.cache}/kvferry"
  local env=$root/unit-numpy-$numpy-pytest-$pytest
  if [ ! -e "$env/complete" ]; then
    rm -rf "$env"
    python3 -m venv "$env"
    "$env/bin/pip" install --quiet --disable-pip-version-check "numpy==$numpy" "pytest==$pytest"
    touch "$env/complete"
  fi
  cd tests/unit
  PYTHONPATH=$package "$env/bin/python" -m pytest -c ../../pyproject.toml --rootdir .
}
lane unit unit_tests

# `changed`, `affected` and `tests`, as arguments for cargo.
eval "$( (git diff --name-only "$base" && git ls-files --others --exclude-standard) |
  python3 tools/changed.py "$metadata")"
failed=0
if [ ${#changed[@]} -gt 0 ]; then
  cargo clippy "${affected[@]}" --all-targets --locked -- -D warnings || failed=1
  # Many of them wait for each other's clocks.
  RUST_TEST_THREADS=8 cargo test "${changed[@]}" "${tests[@]}" --locked --no-fail-fast || failed=1
fi
for lane in "${lanes[@]}"; do
  wait "$lane" || failed=1
done
cat "$logs"/*
printf '\n== %s in %d s\n' "$([ $failed = 0 ] && echo "what changed is well" || echo "FAILED (see above)")" $((SECONDS - began))
exit $failed
