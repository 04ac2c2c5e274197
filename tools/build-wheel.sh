#!/usr/bin/env bash
# Builds the wheel that users install without Rust: one for every Python from 3.11 on (abi3), for Linux with
# glibc 2.28 or later (manylinux_2_28), stripped.
#
#   tools/build-wheel.sh FOLDER [TARGET]    TARGET: x86_64-unknown-linux-gnu (this machine's, by default) or
#                                           aarch64-unknown-linux-gnu, if rustup has it
#
# With it go the licences of what is linked in (tools/licences.py) and a list of that, which maturin makes (CycloneDX).
# zig's C compiler links against an old glibc on any machine. It and maturin are installed on first use,
# outside the tree, under a name that says their versions.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1
target=${2:-$(rustc -vV | sed -n 's/^host: //p')}
maturin=1.16.0 zig=0.15.2
root="${XDG_CACHE_HOME:-$HOME/.cache}/kvferry"
env="$root/wheel-maturin-$maturin-zig-$zig"

mkdir -p "$root"
exec 9>"$root/lock-wheel"
flock 9
if [ ! -e "$env/complete" ]; then
  rm -rf "$env"
  python3 -m venv "$env"
  "$env/bin/pip" install --quiet --disable-pip-version-check "maturin==$maturin" "ziglang==$zig"
  touch "$env/complete"
fi
flock -u 9

# Where pyproject.toml says that they are.
trap 'rm -rf third-party' EXIT
python3 tools/licences.py third-party "$target"
PATH="$env/bin:$PATH" maturin build --release --strip --locked --zig --compatibility manylinux_2_28 \
  --target "$target" --out "$out"
