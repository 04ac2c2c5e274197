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
#                                        Kimi-Linear; beside vLLM's OffloadingConnector
#   tools/check-gpu-vllm.sh qwen3 wide   only these; `wide` checks nothing: it measures how long hand-overs take
#   tools/check-gpu-vllm.sh --transport nixl   not what the connector chooses by itself, which here is cuda
#   tools/check-gpu-vllm.sh --kernel copy.ptx  with the copy kernel compiled beforehand
#
# PYTHON        the python of the environment with vLLM in it; without it, `python3`
# KVFERRY_NIXL  the NIXL library, where it is not in that environment
#
# Ends with 0 if all is right, after some minutes: Triton compiles and tunes its kernels first. An engine
# wants a tenth of the GPU's memory to be free, and 8 GiB of it at least.
set -euo pipefail
cd "$(dirname "$0")/../tests/engines"
exec timeout 1800 "${PYTHON:-python3}" gpu_handover.py "$@"
