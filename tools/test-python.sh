#!/usr/bin/env bash
# Builds the Python package, installs it beside the real vLLM and the real SGLang, and runs its tests. Installs both on
# first use.
#
#   tools/test-python.sh             what every run of all tests runs
#   tools/test-python.sh --all       also the pairs of engines that are marked `more`
#   tools/test-python.sh FILE ARG…   one file or folder of tests, with arguments for pytest: also other files of the
#                                    same folder
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/lanes.sh
python=$(tools/python-env.sh dev)
# What kvferry's own rules say about real models, to compare with.
KVFERRY_MANIFESTS=$(tools/manifests.sh)
# Two hosts on this machine, and the wire between them; the command that operators use.
KVFERRY_WIRE=$(dirname "$(dirname "$KVFERRY_MANIFESTS")")/kvferry-wire
KVFERRY_COMMAND=$(dirname "$KVFERRY_WIRE")/kvferry
export KVFERRY_MANIFESTS KVFERRY_WIRE KVFERRY_COMMAND OMP_NUM_THREADS=1

# From elsewhere: the installed package is tested, not the source tree. A folder is a process: engines
# are forked, which a process whose threads have worked does not survive.
pytest() {
  local folder=$1
  shift
  (cd "tests/$folder" && PYTHONPATH=$(beside "$folder") "$python" -m pytest -c ../../pyproject.toml --rootdir . --confcutdir .. "$@")
}

# What else a folder's tests import.
beside() {
  [ "$1" != sglang ] || "$(../../tools/sglang-env.sh)" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# What is no test of pytest's, and fails like one (tests/conftest.py).
check() {
  "$@" && return
  failed=1
  [ -z "${KVFERRY_DURATIONS:-}" ] ||
    printf '{"name": "%s", "failed": "what it said is further up"}\n' "$*" >>"$KVFERRY_DURATIONS"
}

case "${1:-}" in
"" | --all)
  # Engines spend much of their time starting and waiting, servers most: three lanes of them, side by side.
  which=$([ "${1:-}" = --all ] && echo "more or not more" || echo "not more")
  servers=(test_client.py test_hosts.py test_rolling.py test_served.py test_served_both.py)
  failed=0
  lane servers pytest engines "${servers[@]}" -m "$which"
  check "$python" -m mypy python
  # From elsewhere, again.
  check env -C tests "$python" -m mypy.stubtest kvferry._core
  pytest unit || failed=1
  pytest python || failed=1
  lane life pytest engines life -m "$which"
  pytest engines . --ignore life "${servers[@]/#/--ignore=}" -m "$which" || failed=1
  pytest sglang . -m "$which" || failed=1
  for lane in "${lanes[@]}"; do
    wait "$lane" || failed=1
  done
  cat "$logs"/*
  exit $failed
  ;;
*)
  path=${1#tests/}
  folder=${path%%/*}
  path=${path#"$folder"}
  shift
  pytest "$folder" ".${path:-/}" "${@/#tests\/$folder\//./}"
  ;;
esac
