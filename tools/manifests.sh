#!/usr/bin/env bash
# Builds the programs that Python tests use, and prints the path of the one that says what kvferry's own rules
# make of a model.
set -euo pipefail
cd "$(dirname "$0")/.."
# With the features of the whole workspace, as everything is built in tests: nothing is built twice.
cargo build --quiet --locked --workspace --example manifests --bin kvferry-wire --bin kvferry
target=$(cargo metadata --format-version 1 --no-deps --locked |
  python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')
echo "$target/debug/examples/manifests"
