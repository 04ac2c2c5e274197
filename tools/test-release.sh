#!/usr/bin/env bash
# Today's kvferry beside an earlier one, with real engines: pairs in both directions, token by token; then four servers
# behind the router that change from the earlier one to today's while requests go on. Builds the earlier one on first
# use, outside the tree.
#
#   tools/test-release.sh COMMIT [ARG…]    COMMIT, or a tag: the earlier one; with arguments for pytest
set -euo pipefail
cd "$(dirname "$0")/.."
commit=$(git rev-parse --verify --short=12 "$1^{commit}")
shift
tree="${XDG_CACHE_HOME:-$HOME/.cache}/kvferry/release-$commit"
if [ ! -e "$tree" ]; then
  made=$(mktemp -d "$tree.XXXXXX")
  git archive "$commit" | tar -x -C "$made"
  mv "$made" "$tree"
fi
KVFERRY_OLDER=$("$tree/tools/python-env.sh" dev)
vllm=$("$KVFERRY_OLDER" -c 'import importlib.metadata as m; print(m.version("vllm").partition("+")[0])')
export KVFERRY_OLDER KVFERRY_OTHER_VLLM="$vllm=$KVFERRY_OLDER"
tools/test-python.sh tests/engines/test_versions.py -k both_ways "$@"
tools/test-python.sh tests/engines/test_rolling.py -s "$@"
