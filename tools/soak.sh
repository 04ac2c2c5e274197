#!/usr/bin/env bash
# Installs the package beside the real vLLM and keeps servers of a trained model busy behind vllm-router while they are killed,
# drained and restarted; tools/soak says what it does and takes the arguments.
#
#   tools/soak.sh [ARG…]
#   PYTHON=… tools/soak.sh [ARG…]    with an environment that has vllm, vllm-router and kvferry already
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(tools/python-env.sh release)}
PYTHONPATH=tools exec "$python" -m soak "$@"
