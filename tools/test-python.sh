#!/usr/bin/env bash
# Builds the Python package, installs it beside the real vLLM and runs its tests. Installs vLLM on
# first use.
#
#   tools/test-python.sh             what every run of all tests runs
#   tools/test-python.sh --all       also the pairs of engines that are marked `more`
#   tools/test-python.sh FILE ARG…   one file of tests, with arguments for pytest
set -euo pipefail
cd "$(dirname "$0")/.."
base=$(tools/vllm-env.sh)
root="${XDG_CACHE_HOME:-$HOME/.cache}/kvferry"
maturin=1.16.0 mypy=2.4.1

# An environment of this checkout's own, on top of the one with vLLM in it: checkouts do not see each
# other's builds.
env="$root/python-$(printf '%s' "$PWD" | sha256sum | cut -c1-12)-$(basename "$(dirname "$(dirname "$base")")")"
python="$env/bin/python"
if [ ! -e "$env/complete-$maturin-$mypy" ]; then
  rm -rf "$env"
  "$base" -m venv --without-pip "$env"
  "$base" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
  "$base" -m uv pip install --quiet --python "$python" "maturin==$maturin" "mypy==$mypy"
  touch "$env/complete-$maturin-$mypy"
fi

# The wheel, as `pip install .` makes it. The target directory is cargo's own, so that a second run
# builds only what changed.
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
PATH="$env/bin:$PATH" "$env/bin/maturin" build --quiet --locked --profile dev --interpreter "$python" --out "$wheels"
"$base" -m uv pip install --quiet --python "$python" --no-deps --reinstall "$wheels"/*.whl

"$python" -m mypy python

# What kvferry's own rules say about real models, to compare with.
cargo build --quiet --locked --package kvferry-models --example manifests
target=$(cargo metadata --format-version 1 --no-deps --locked |
  "$python" -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')
export KVFERRY_MANIFESTS="$target/debug/examples/manifests"

# From elsewhere: the installed package is tested, not the source tree. A folder is a process: engines
# are forked, which a process whose threads have worked does not survive.
pytest() {
  local folder=$1
  shift
  (cd "tests/$folder" && "$python" -m pytest -c ../../pyproject.toml --rootdir . "$@")
}
export OMP_NUM_THREADS=1
case "${1:-}" in
"" | --all)
  (cd tests && "$python" -m mypy.stubtest kvferry._core)
  pytest python
  pytest engines -m "$([ "${1:-}" = --all ] && echo "more or not more" || echo "not more")"
  ;;
*)
  file=$1
  shift
  pytest "$(basename "$(dirname "$file")")" "$(basename "$file")" "$@"
  ;;
esac
