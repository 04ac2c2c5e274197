#!/usr/bin/env bash
# What a release of vLLM means for kvferry, on one page: what is new, what moved, what must be decided. Compares it with
# the version that all tests run with, and runs the page rules and pairs of engines with it. Less than half an hour on
# two cores, and a few gigabytes under ~/.cache/kvferry.
#
#   tools/new-vllm.sh [VERSION]    the newest release, if none is named; prints the page
set -euo pipefail
cd "$(dirname "$0")/.."
new=${1:-$(python3 -m pip index versions vllm 2>/dev/null | sed -n '1s/.*(\(.*\)).*/\1/p')}
[ -n "$new" ] || { echo "the index does not say which release of vLLM is the newest: name it" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

old=$(tools/python-env.sh dev)
python=$(tools/python-env.sh dev "$new")
for each in "old $old" "new $python"; do
  VLLM_LOGGING_LEVEL=ERROR "${each#* }" tools/new-vllm.py facts >"$work/${each%% *}.json"
done
# Failures are on the page.
KVFERRY_MANIFESTS=$(tools/manifests.sh) "$python" -m pytest -q -p no:cacheprovider -p no:logging --show-capture=no \
  -W ignore::DeprecationWarning tests/vllm --junitxml "$work/rules.xml" >&2 || true
VERSIONS=$new tools/test-versions.sh --junitxml "$work/pairs.xml" >&2 || true
"$old" tools/new-vllm.py page "$work"
