#!/usr/bin/env bash
# Builds the wheel, installs it in an environment of this checkout's own on top of the one with vLLM in
# it, and prints the path of that environment's python. Checkouts do not see each other's builds.
#
#   tools/python-env.sh dev|release [VERSION]    VERSION of vLLM: see tools/vllm-env.sh
set -euo pipefail
cd "$(dirname "$0")/.."
profile=$1
maturin=1.16.0 mypy=2.4.1
# For the rules by which it chooses how to hand over; without all that it needs to run.
dynamo=1.6.1
base=$(tools/vllm-env.sh "${@:2}")
root="${XDG_CACHE_HOME:-$HOME/.cache}/kvferry"
env="$root/python-$profile-$(printf '%s' "$PWD" | sha256sum | cut -c1-12)-$(basename "$(dirname "$(dirname "$base")")")"
python="$env/bin/python"

if [ ! -e "$env/complete-$maturin-$mypy-$dynamo" ]; then
  rm -rf "$env"
  "$base" -m venv --without-pip "$env"
  "$base" -c 'import sys; print(*(path for path in sys.path if path.endswith("site-packages")), sep="\n")' \
    >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
  "$base" -m uv pip install --quiet --python "$python" "maturin==$maturin" "mypy==$mypy"
  "$base" -m uv pip install --quiet --python "$python" --no-deps "ai-dynamo==$dynamo"
  touch "$env/complete-$maturin-$mypy-$dynamo"
fi

# The wheel, as `pip install .` makes it. The target directory is cargo's own, so that only what changed
# is built.
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
{
  PATH="$env/bin:$PATH" "$env/bin/maturin" build --quiet --locked --profile "$profile" \
    --interpreter "$python" --out "$wheels"
  "$base" -m uv pip install --quiet --python "$python" --no-deps --reinstall --compile-bytecode \
    "$wheels"/*.whl
} >&2
echo "$python"
