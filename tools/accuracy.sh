#!/usr/bin/env bash
# Installs the package beside the real vLLM and asks the trained models of models/tiny what they have read, of one
# engine and through hand-overs; tools/accuracy says what it does and takes the arguments.
#
#   tools/accuracy.sh [ARG…]
#   VLLM=0.33.0 tools/accuracy.sh [ARG…]    with another version of vLLM: see tools/vllm-env.sh
#   PYTHON=… tools/accuracy.sh [ARG…]         with an environment that has vllm, nixl and kvferry already
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(tools/python-env.sh dev ${VLLM:-})}
PYTHONPATH=tools exec "$python" -m accuracy "$@"
