#!/usr/bin/env bash
# Draws copies.png, the picture in README.md: the ribbons of the page that `kvferry explain` writes.
# Run it again when that page looks different. Needs chromium.
set -euo pipefail
cd "$(dirname "$0")/../.."
page=$(mktemp --suffix=.html)
trap 'rm -f "$page"' EXIT
cargo run --quiet --release -- explain --model kimi-linear --prefill tp=4 --decode tp=2,pp=2 --out "$page" >/dev/null
grep -q 'aria-labelledby="copies-title"' "$page" || {
  echo "The page has no section 'copies-title' any more: choose another one in $0." >&2
  exit 1
}
# Only the section with the ribbons, without its hints for the mouse and the keyboard.
cat >>"$page" <<'STYLE'
<style>
  body > *, main > * { display: none !important }
  body > main, main > [aria-labelledby="copies-title"] { display: block !important; margin: 0 }
  [aria-labelledby="copies-title"] p.soft, #detail { display: none }
  main { padding: 8px !important }
</style>
STYLE
chromium --headless --no-sandbox --disable-gpu --disable-background-networking --hide-scrollbars \
  --force-device-scale-factor=1.5 --window-size=880,790 --screenshot="$PWD/docs/pictures/copies.png" \
  "file://$page" 2>/dev/null
echo "wrote docs/pictures/copies.png"
