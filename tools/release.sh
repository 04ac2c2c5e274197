#!/usr/bin/env bash
# Makes a release: checks, builds what can be built on this machine, and tags. Pushing the tag publishes
# (.github/workflows/release.yml).
#
#   tools/release.sh VERSION              of a clean tree. What is built is in dist/VERSION
#   tools/release.sh --dry-run VERSION    the same of the tree as it is, without the tag
#   tools/release.sh --check VERSION      what takes no build: seconds
#
# The version stands in Cargo.toml; `python3 tools/release.py set VERSION` changes it, and CHANGELOG.md needs a section of it.
set -euo pipefail
cd "$(dirname "$0")/.."
twine=7.0.0

how=release
case "${1:-}" in
--dry-run | --check)
  how=${1#--}
  shift
  ;;
esac
if [ $# != 1 ] || [[ $1 == -* ]]; then
  sed -n '5,7s/^#  *//p' "$0" >&2
  exit 1
fi
version=$1
out=dist/$version
#: What nobody has seen, as far as this run goes.
untried=()

python3 tools/release.py check "$version"
if [ "$how" = release ]; then
  changed=$(git status --porcelain)
  if [ -n "$changed" ]; then
    printf 'the tree is not clean: commit or stash these first, or use --dry-run\n%s\n' "$changed" >&2
    exit 1
  fi
  if git rev-parse --quiet --verify "refs/tags/v$version" >/dev/null; then
    printf 'the tag v%s is there already: a version is released once. Choose another one\n' "$version" >&2
    exit 1
  fi
fi
if ! said=$(python3 tools/check-dependencies.py 2>&1); then
  printf '%s\n' "$said" >&2
  exit 1
elif [[ $said == *"NOT CHECKED"* ]]; then
  untried+=("advisories: nobody looked for known vulnerabilities; the workflow does, with cargo-deny")
fi
if [ "$how" = check ]; then
  out=$(mktemp -d)
  trap 'rm -rf "$out"' EXIT
fi
rm -rf "$out"
mkdir -p "$out"
python3 tools/release.py notes "$version" >"$out/notes.md"
python3 tools/licences.py "$out/licences"
printf '%s: metadata, changelog and licences are complete\n' "$version"
if [ "$how" = check ]; then
  exit
fi

target=$(rustc -vV | sed -n 's/^host: //p')
targets=("$target")
for other in x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu; do
  if [ "$other" = "$target" ]; then
    continue
  elif rustup target list --installed 2>/dev/null | grep -qx "$other"; then
    targets+=("$other")
    untried+=("wheel for $other: built, not run")
  else
    untried+=("wheel for $other: not built (rustup target add $other)")
  fi
done
for target in "${targets[@]}"; do
  tools/build-wheel.sh "$out" "$target"
done
for wheel in "$out"/*.whl; do
  python3 tools/release.py wheel "$wheel" "$out"
done
tools/test-wheel.sh "$out"
mapfile -t crates < <(python3 tools/release.py crates)
allow=()
if [ "$how" = dry-run ]; then
  allow=(--allow-dirty)
fi
cargo package --locked --quiet --no-verify "${allow[@]}" --target-dir "$out/cargo" "${crates[@]/#/--package=}"
mv "$out"/cargo/package/*.crate "$out"
rm -r "$out/cargo"

# The description as PyPI shows it.
python3 -m venv "$out/twine"
"$out/twine/bin/pip" install --quiet --disable-pip-version-check "twine==$twine"
"$out/twine/bin/twine" check --strict "$out"/*.whl
rm -r "$out/twine"

(cd "$out" && sha256sum -- *.whl *.crate *.json >SHA256SUMS)
if [ "$how" = release ]; then
  git tag --annotate --file "$out/notes.md" --cleanup=verbatim "v$version"
  printf 'tagged. This publishes it: git push origin v%s\n' "$version"
fi
untried+=(
  "crates: packed, not built from their packages alone (cargo publish does that)"
  "image: deploy/Containerfile was not built"
  "publishing to PyPI, crates.io and ghcr.io, and the attestations: only the workflow can"
  "names: whether PyPI and crates.io have kvferry free for us was not asked"
  "addresses: the repository's is not known, so neither wheel nor crates have links"
  "GPUs and several hosts: tools/check-gpu.sh, tests/engines/test_hosts.py"
)
printf '\n%s is in %s:\n' "$version" "$out"
(cd "$out" && du -h -- *.whl *.crate *.json notes.md SHA256SUMS | sed 's/^/  /')
printf 'Not built or not tried here:\n'
printf '  - %s\n' "${untried[@]}"
