#!/usr/bin/env bash
# Installs the package as released beside the real vLLM and runs bench_vllm, which says what it
# measures and takes the arguments.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(tools/python-env.sh release)}
cd tools
exec "$python" -m bench_vllm "$@"
