#!/usr/bin/env bash
# Today's kvferry beside an earlier one, with real engines: pairs in both directions, token by token; then four servers
# behind the router that change from the earlier one to today's while requests go on. Builds the earlier one on first
# use, outside the tree.
#
#   tools/test-release.sh COMMIT [ARG…]    COMMIT, or a tag: the earlier one; with arguments for pytest
set -euo pipefail
cd "$(dirname "$0")/.."
if ! commit=$(git rev-parse --quiet --verify --short=12 "${1:-}^{commit}"); then
  echo "usage: tools/test-release.sh COMMIT [ARG…]: '${1:-}' is no commit of this repository" >&2
  exit 2
fi
shift
cache="${XDG_CACHE_HOME:-$HOME/.cache}/kvferry"
tree="$cache/release-$commit"
if [ ! -e "$tree" ]; then
  mkdir -p "$cache"
  # Under another name until it is whole.
  made=$(mktemp -d "$tree.partial-XXXXXX")
  git archive "$commit" | tar -x -C "$made"
  mv "$made" "$tree"
fi
KVFERRY_OLDER=$("$tree/tools/python-env.sh" dev)
vllm=$("$KVFERRY_OLDER" -c 'import importlib.metadata as m; print(m.version("vllm").partition("+")[0])')
export KVFERRY_OLDER KVFERRY_OTHER_VLLM="$vllm=$KVFERRY_OLDER"
tools/test-python.sh tests/engines/test_versions.py::test_a_pair_of_versions_hands_over_both_ways "$@"
tools/test-python.sh tests/engines/test_rolling.py -s "$@"
