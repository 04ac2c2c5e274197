# Commands side by side, for scripts that source this.
#
# A lane is in a process group of its own, so that it can be ended with all that it started. It is, as by
# Ctrl-C, when the script ends, however that comes. What it prints is in "$logs", in a file of its name.
logs=$(mktemp -d)
lanes=()

# lane NAME COMMAND…: starts it; its process is the last of "${lanes[@]}".
lane() {
  local log=$logs/$1
  shift
  set -m
  ("$@") >"$log" 2>&1 &
  set +m
  lanes+=($!)
}

end_lanes() {
  local lane
  for lane in "${lanes[@]}"; do
    kill -INT -- "-$lane" 2>/dev/null || true
  done
  rm -rf "$logs"
}
trap end_lanes EXIT
trap 'exit 130' INT TERM
