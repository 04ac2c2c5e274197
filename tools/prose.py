"""Looks for words that only we use, in the pages that people see first. Run by tools/test-docs.sh.

    python3 tools/prose.py [PAGE…]    PAGES, if none is named

A reader who comes from vLLM searches for the field's words, and stumbles over ours. Code, links and quotations of code are
left out. A page that has been rewritten goes into PAGES; a word that turns out to be private goes into WORDS.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "python/README.md",
    "crates/*/README.md",
    "docs/index.md",
    "docs/getting-started.md",
    ".github/ISSUE_TEMPLATE/*.yml",
)
#: What must not be said, as a regular expression, and what to say instead.
WORDS = {
    r"hand(s|ed|ing)? (\w+ )?over|hand-?overs?": "transfer",
    r"takes? over": "load, receive",
    r"remembers? of": "KV cache",
    r"keeps? of a prompt": "cache of a prompt",
    r"(reads?|read) the prompt|computes? (the|its|their) prompts? (itself|themselves)": "run the prefill; fall back to a local prefill",
    r"(some|any|no)(body|one)|whoever": "name who it is: a client, a peer, a user",
    r"(?<!there )(is|are) no (?!longer)\w+": "is not a …",
    r"(is|are|was|were) (told|forgotten|let go)|lets? go of": "configured, disconnected, released",
    r"(hear|hears|heard) of": "is notified of",
    r"all the same": "anyway",
    r"bytes lie|where it lies": "are at, layout",
    r"rivals?": "its name, or: other connectors",
    r"guess(es|ed)?( tokens)?": "speculate, draft tokens",
    r"dialogues?": "multi-turn conversation",
    r"turns? away|turned away": "reject",
    r"(yard|errand|porter|tidings|looker|pupil|aloft|forsaken|overheard|fellows|lowering)s?": "a word of the field",
}
RULES = [(re.compile(rf"(?<![\w-])(?:{word})(?![\w-])", re.IGNORECASE), better) for word, better in WORDS.items()]
# The two servers as actors. In brackets the letters may be introduced.
RULES.append((re.compile(r"(?<![\w/(-])[PD](?='s\b|[ ,.;:])"), "prefill server, decode server"))
#: Fenced blocks, comments, code, addresses of links, tags: with their lines kept.
QUOTED = re.compile(r"^```.*?^```|<!--.*?-->|`[^`\n]*`|\]\([^)\n]*\)|<[^>]*>", re.MULTILINE | re.DOTALL)


def private(text):
    """Line, words and what to say instead, for each private word in a page."""
    prose = QUOTED.sub(lambda quoted: "\n" * quoted[0].count("\n") or "]", text)
    # A line's end is a space like any other.
    flat = prose.replace("\n", " ")
    found = [(prose.count("\n", 0, hit.start()) + 1, hit[0], better) for rule, better in RULES for hit in rule.finditer(flat)]
    return sorted(found)


def main(*pages):
    paths = [path for page in pages or PAGES for path in sorted(ROOT.glob(page))]
    problems = [
        f"{path.relative_to(ROOT)}:{line}: '{words}': say instead: {better}"
        for path in paths
        for line, words, better in private(path.read_text())
    ]
    print("\n".join([*problems, f"prose: {len(paths)} pages, {len(problems)} problems"]))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
