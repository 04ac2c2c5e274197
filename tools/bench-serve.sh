#!/usr/bin/env bash
# Installs the package as released beside the real vLLM and runs vLLM's own benchmark of servers on pairs behind vllm-router;
# tools/bench_serve says what it measures and takes the arguments.
#
#   tools/bench-serve.sh [ARG…]
#   PYTHON=… tools/bench-serve.sh [ARG…]    with an environment that has vllm, vllm-router, nixl and kvferry already
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(tools/python-env.sh release)}
PYTHONPATH=tools exec "$python" -m bench_serve "$@"
