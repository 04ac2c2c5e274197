#!/usr/bin/env bash
# Compares kvferry's page rules with the installed vLLM's own functions. Installs vLLM on first use.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(tools/vllm-env.sh)
KVFERRY_MANIFESTS=$(tools/manifests.sh)
export KVFERRY_MANIFESTS
exec "$python" -m pytest -q -p no:cacheprovider -p no:logging --show-capture=no -W ignore::DeprecationWarning tests/vllm "$@"
