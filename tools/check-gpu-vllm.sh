#!/usr/bin/env bash
# Two vLLM engines on one GPU with FerryConnector between them: one prefills, the other decodes, and every
# token must be what one engine alone would say; also with kernels that write late. Run it on a machine with
# a GPU:
#
#   pip install 'vllm==0.32.*' nixl .
#   tools/check-gpu-vllm.sh              tiny random models: attention (Triton, FlashAttention), CUDA graphs,
#                                        asynchronous scheduling, drafts (looked up, and of a model), windows,
#                                        requests sent to both at once, quantised caches, Mamba in both orders
#                                        of its convolution, delta nets, MLA (Triton, FlashMLA, FlashAttention),
#                                        Kimi-Linear; beside vLLM's OffloadingConnector; P with its NixlConnector
#   tools/check-gpu-vllm.sh qwen3 wide   only these; `wide` checks nothing: it measures how long hand-overs take;
#                                        `wide-stock` does so from P with NixlConnector
#   tools/check-gpu-vllm.sh --transport nixl   not what the connector chooses by itself, which here is cuda
#   tools/check-gpu-vllm.sh --kernel copy.ptx  with the copy kernel compiled beforehand
#   tools/check-gpu-vllm.sh --jobs 4     so many pairs side by side, which takes less time
#
# PYTHON            the python of the environment with vLLM in it; without it, `python3`
# KVFERRY_NIXL      the NIXL library, where it is not in that environment
# KVFERRY_GPU_JOBS  how many pairs run side by side, where --jobs does not say it
#
# Ends with 0 if all is right, after some minutes: Triton compiles and tunes its kernels first. An engine
# wants a tenth of the GPU's memory to be free, and 8 GiB of it at least; a pair is two of them.
set -euo pipefail
cd "$(dirname "$0")/../tests/engines"
python=${PYTHON:-python3}
missing=$("$python" -c 'import importlib.util as u
print(*[name for name in ("torch", "vllm", "kvferry") if not u.find_spec(name)])')
if [ -n "$missing" ]; then
  echo "NOT CHECKED: $python does not have: $missing. Install them (pip install 'vllm==0.32.*' nixl .), or name" \
    "an environment that has them by PYTHON" >&2
  exit 1
fi
exec timeout 1800 "$python" gpu_handover.py "$@"
