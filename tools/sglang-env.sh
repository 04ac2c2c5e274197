#!/usr/bin/env bash
# Makes (once) a Python environment with the real SGLang in it, beside the vLLM that all tests run with, and prints the
# path of its python.
#
#   tools/sglang-env.sh
#
# SGLang asks for two hundred packages, most of them kernels for GPUs, and for torch's CUDA build once more. On a CPU it runs
# with what vLLM's environment has, its own router, and three light packages that it imports whatever it does; what else it
# lacks has stand-ins in tests/sglang. Like that of vLLM, the environment lies outside the tree, under a name that says what is in it.
set -euo pipefail

sglang=0.5.23 router=0.3.2 ipython=9.18.1 traitlets=5.16.1 gguf=0.19.0
base=$("$(dirname "$0")/vllm-env.sh")
root="${XDG_CACHE_HOME:-$HOME/.cache}/kvferry"
env="$root/sglang-$sglang-router-$router-ipython-$ipython-gguf-$gguf-$(basename "$(dirname "$(dirname "$base")")")"
python="$env/bin/python"

exec 9>"$root/lock-sglang"
flock 9

if [ ! -e "$env/complete" ]; then
  rm -rf "$env"
  {
    "$base" -m venv --without-pip "$env"
    "$base" -c 'import sys; print(*(path for path in sys.path if path.endswith("site-packages")), sep="\n")' \
      >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
    "$base" -m uv pip install --quiet --python "$python" --no-deps \
      "sglang==$sglang" "sglang-router==$router" "ipython==$ipython" "traitlets==$traitlets" "gguf==$gguf"
    "$python" -W ignore -c "import sglang; assert sglang.__version__ == '$sglang'"
    env -u PYTHONDONTWRITEBYTECODE "$python" -m compileall -q -j 0 "$env/lib" || true
  } >&2
  touch "$env/complete"
fi
echo "$python"
