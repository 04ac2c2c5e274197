#!/usr/bin/env bash
# How many lines are shipped, by crate: see tools/lines.py.
set -euo pipefail
exec python3 "$(dirname "$0")/lines.py"
