#!/usr/bin/env bash
# Compares kvferry's page rules with the installed vLLM's own functions. Installs vLLM on first use.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(tools/vllm-env.sh)
cargo build --quiet --package kvferry-models --example manifests
target=$(cargo metadata --format-version 1 --no-deps |
  "$python" -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')
export KVFERRY_MANIFESTS="$target/debug/examples/manifests"
exec "$python" -m pytest -q -p no:cacheprovider -p no:logging --show-capture=no -W ignore::DeprecationWarning tests/vllm "$@"
