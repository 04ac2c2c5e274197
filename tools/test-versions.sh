#!/usr/bin/env bash
# Pairs of real engines of different versions of vLLM, token by token. Makes an environment for each version
# on first use, outside the tree; they share files where the file system can.
#
#   tools/test-versions.sh [ARG…]    with arguments for pytest
set -euo pipefail
cd "$(dirname "$0")/.."
others=()
for version in 0.30.0 0.31.0; do
  others+=("$version=$(tools/python-env.sh dev "$version")")
done
export KVFERRY_OTHER_VLLM="${others[*]}"
exec tools/test-python.sh tests/engines/test_versions.py "$@"
