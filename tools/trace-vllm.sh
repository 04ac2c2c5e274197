#!/usr/bin/env bash
# Installs the package as released beside the real vLLM and runs trace-vllm.py, which says what it
# measures and takes the arguments.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(tools/python-env.sh release)
exec "$python" tools/trace-vllm.py "$@"
