#!/usr/bin/env bash
# Builds the wheel, installs it in an empty environment in which there is no Rust, and hands a request over
# with it. Then lets cargo pack every crate that is published.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

tools/build-wheel.sh "$work/wheels"
python3 -m venv "$work/empty"
"$work/empty/bin/pip" install --quiet --disable-pip-version-check "$work"/wheels/*.whl
cp examples/python/handover.py "$work"
# From elsewhere, so that only what is installed can be imported; and without a tool chain.
(cd "$work" && env -i PATH=/usr/bin:/bin HOME="$work" "$work/empty/bin/python" handover.py)
for wheel in "$work"/wheels/*.whl; do
  printf '%s: %s KiB, installs and works without Rust\n' "$(basename "$wheel")" $(($(stat -c %s "$wheel") / 1024))
done

cargo package --workspace --exclude kvferry-bench --exclude kvferry-testkit --exclude kvferry-docs --exclude kvferry-python \
  --locked --quiet --no-verify --target-dir "$work/target"
printf '%s crates packed\n' "$(ls "$work"/target/package/*.crate | wc -l)"
