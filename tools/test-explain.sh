#!/usr/bin/env bash
# Tests the page of `kvferry explain` in a real browser. Installs chromium where it may.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v chromium >/dev/null || ! command -v chromedriver >/dev/null; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "This test needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)." >&2
    exit 1
  fi
  {
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y chromium chromium-driver
  } >&2
fi
# The whole workspace is named so that nothing is built again: features are unified as in the other tests.
exec cargo test --workspace --test explain -- --include-ignored "$@"
