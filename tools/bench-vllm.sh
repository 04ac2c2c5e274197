#!/usr/bin/env bash
# Installs the package as released beside the real vLLM and runs bench-vllm.py, which says what it
# measures and takes the arguments.
set -euo pipefail
cd "$(dirname "$0")/.."
base=$(tools/vllm-env.sh)
root="${XDG_CACHE_HOME:-$HOME/.cache}/kvferry"
maturin=1.16.0

# Not the environment of the tests: theirs holds a debug build.
env="$root/bench-$(printf '%s' "$PWD" | sha256sum | cut -c1-12)-$(basename "$(dirname "$(dirname "$base")")")"
python="$env/bin/python"
if [ ! -e "$env/complete-$maturin" ]; then
  rm -rf "$env"
  "$base" -m venv --without-pip "$env"
  "$base" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
  "$base" -m uv pip install --quiet --python "$python" "maturin==$maturin"
  touch "$env/complete-$maturin"
fi
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
PATH="$env/bin:$PATH" "$env/bin/maturin" build --quiet --locked --release --interpreter "$python" --out "$wheels"
"$base" -m uv pip install --quiet --python "$python" --no-deps --reinstall "$wheels"/*.whl
"$python" tools/bench-vllm.py "$@"
