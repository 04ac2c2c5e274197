#!/usr/bin/env bash
# What the kernels of each supported version of vLLM write for a fixed input, where Triton's interpreter can carry them
# out: the table that ships (python/kvferry/vllm/kernels/fingerprints.json), and docs/fingerprints.md. A minute.
#
#   tools/fingerprints.sh [VERSION…]    which versions; the newest two, if none is named
set -euo pipefail
cd "$(dirname "$0")/.."
exec "$(tools/python-env.sh dev)" tools/fingerprints.py "$@"
