#!/usr/bin/env bash
# Pairs of real engines of different versions of vLLM, token by token. Makes an environment for each version
# on first use, outside the tree; they share files where the file system can. What an engine of 0.33 shows and what it
# does not: tools/vllm-env.sh, "Of a version that has no CPU build yet".
#
#   tools/test-versions.sh [ARG…]               with arguments for pytest
#   VERSIONS="0.34.0" tools/test-versions.sh    others than those that are supported
set -euo pipefail
cd "$(dirname "$0")/.."
others=()
for version in ${VERSIONS:-0.31.0 0.33.0}; do
  others+=("$version=$(tools/python-env.sh dev "$version")")
done
export KVFERRY_OTHER_VLLM="${others[*]}"
exec tools/test-python.sh tests/engines/test_versions.py "$@"
