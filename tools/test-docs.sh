#!/usr/bin/env bash
# Builds the book in docs/ and checks every link, anchor and path in it and in the other documents, and the words of the
# pages that people see first (tools/prose.py).
#
#   tools/test-docs.sh           the checks alone
#   tools/test-docs.sh FOLDER    and leaves the pages in FOLDER, to be read from FOLDER/index.html
#
# mkdocs is installed on first use, outside the tree, under a name that says its version.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdocs=1.6.1 markdown=3.11.3
root="${XDG_CACHE_HOME:-$HOME/.cache}/kvferry"
env="$root/mkdocs-$mkdocs-markdown-$markdown"

mkdir -p "$root"
exec 9>"$root/lock-docs"
flock 9
if [ ! -e "$env/complete" ]; then
  rm -rf "$env"
  python3 -m venv "$env"
  "$env/bin/pip" install --quiet --disable-pip-version-check "mkdocs==$mkdocs" "markdown==$markdown"
  touch "$env/complete"
fi
flock -u 9

if [ $# -gt 0 ]; then
  site=$1
else
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
fi
# A link that leads nowhere is a warning, and a warning is an error; not so with `--quiet`, which drops
# warnings before they are counted. The addresses end in `.html`, so that the pages can be read without a
# server.
"$env/bin/mkdocs" build --strict --no-directory-urls --site-dir "$site"

"$env/bin/python" tools/prose.py
"$env/bin/python" - <<'PYTHON'
"""Links between the documents outside of the book, and every path that any document names."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from urllib.parse import unquote

import markdown

TOP = re.compile(r"(?:crates|deploy|docs|examples|fuzz|python|tests|tools)/")
problems = []


class Page(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.links, self.anchors, self.code, self.inside = [], set(), [], []
        self.feed(markdown.markdown(path.read_text(), extensions=["tables", "fenced_code", "toc"]))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.inside.append(tag)
        self.links += [attributes[name] for name in ("href", "src") if name in attributes]
        self.anchors |= {attributes["id"]} if "id" in attributes else set()

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        if "code" in self.inside:
            self.code.append(data)


def expanded(path):
    """`test_{a,b}.py` names two files."""
    parts = [part.split(",") for part in re.split(r"[{}]", path)]
    return ["".join(words) for words in product(*parts)]


def exists(path):
    """In the tree, or made by a command: git is told to ignore such files."""
    if any(Path().glob(path)) if "*" in path else Path(path).exists():
        return True
    return subprocess.run(["git", "check-ignore", "-q", path]).returncode == 0


tracked = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "*.md"], text=True).split()
for document in map(Path, tracked):
    page = Page(document)
    for link in page.links if document.parts[0] != "docs" else []:
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = document.parent / path if path else document
        if not target.exists():
            problems.append(f"{document}: the link {link} leads nowhere")
        elif anchor and anchor not in (Page(target) if path else page).anchors:
            problems.append(f"{document}: {target} has no section #{anchor}")
    for word in " ".join(page.code).split():
        word = word.strip("`'\",;:()…").split("::")[0]
        if TOP.match(word):
            problems += [f"{document}: there is no {path}" for path in expanded(word) if not exists(path)]
# The first page leads to every other that the book has.
book = set(re.findall(r"^  - .*: (\S+\.md)$", Path("mkdocs.yml").read_text(), re.M)) - {"index.md"}
first = {link.partition("#")[0] for link in Page(Path("docs/index.md")).links}
problems += [f"docs/index.md: no link to {page}" for page in sorted(book - first)]
print("\n".join(problems) or f"documents: {len(tracked)} files, 0 problems")
sys.exit(bool(problems))
PYTHON
