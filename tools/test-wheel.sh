#!/usr/bin/env bash
# Installs a wheel in an empty environment in which there is no Rust, and hands a request over with it.
#
#   tools/test-wheel.sh           builds the wheel first, and lets cargo pack every crate that is published
#   tools/test-wheel.sh FOLDER    the wheel in FOLDER that this machine can run; needs no Rust
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

wheels=${1:-}
if [ -z "$wheels" ]; then
  wheels=$work/wheels
  tools/build-wheel.sh "$wheels"
  mkdir "$work/sbom"
  python3 tools/release.py wheel "$wheels"/*.whl "$work/sbom"
fi
wheel=$(ls "$wheels"/kvferry-*"_$(uname -m).whl")
python3 -m venv "$work/empty"
"$work/empty/bin/pip" install --quiet --disable-pip-version-check "$wheel"
cp examples/python/handover.py "$work"
# From elsewhere, so that only what is installed can be imported; and without a tool chain.
(cd "$work" && env -i PATH=/usr/bin:/bin HOME="$work" "$work/empty/bin/python" handover.py)
printf '%s: %s KiB, installs and works without Rust\n' "$(basename "$wheel")" $(($(stat -c %s "$wheel") / 1024))

if [ $# = 0 ]; then
  mapfile -t crates < <(python3 tools/release.py crates)
  cargo package --locked --quiet --no-verify --target-dir "$work/target" "${crates[@]/#/--package=}"
  printf '%s crates packed\n' "$(ls "$work"/target/package/*.crate | wc -l)"
fi
