#!/usr/bin/env bash
# The transports' unit tests and conformance suite, and the agent's tests, built with AddressSanitizer: memory that is
# used after it was freed, or beyond its end. By hand, and once a week in the workflow.
#
#   tools/sanitize.sh [address|thread] [ARG…]    arguments for the conformance suite: which tests
#
# `thread` (ThreadSanitizer) does not see into the standard library, which is not rebuilt: what it reports there is to be
# read with that in mind, and the compiler wants to hear that it is meant. The switches are the compiler's own, which
# stable ones take when told to.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:-address}
[ $# -gt 0 ] && shift
case $kind in address | thread) ;; *)
  echo "sanitize.sh: '$kind' is neither address nor thread" >&2
  exit 2
  ;;
esac
host=$(rustc -vV | sed -n 's/^host: //p')
export RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=$kind"
[ "$kind" = address ] || RUSTFLAGS+=" -Cunsafe-allow-abi-mismatch=sanitizer"
# Peers are killed on purpose, and what they had is not theirs to free.
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 TSAN_OPTIONS=halt_on_error=0:second_deadlock_stack=1
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-target}/$kind-sanitizer
# A target of its own: the compiler's own plug-ins are built without. All three each time, so that what they share is
# built once.
test=(cargo test --locked --target "$host" -p kvferry-transport -p kvferry-conformance -p kvferry-agent)
"${test[@]}" --lib -- --skip requests::
"${test[@]}" --test attacks
"${test[@]}" --test conformance -- "$@"
