#!/usr/bin/env bash
# Writes the census of the installed vLLM, with kvferry's tables as they are here; --check only looks.
# Installs vLLM and builds the package on first use.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(tools/python-env.sh dev)
cd tools
exec "$python" -m census "$@"
