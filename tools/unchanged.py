"""Tells cargo which files of a clean clone are as they were, so that it builds only what changed.

    python3 tools/unchanged.py RECORD

Cargo goes by times, and all files of a clone are new. RECORD says what each file held when it was last seen in this place,
and since when: a file that still holds that gets its time back, and whatever was built since is as good as it was. A
folder holds the names that are in it.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path


def contents(root):
    """What each file and folder under version control holds, shortly."""
    listed = subprocess.run(
        ["git", "-C", root, "ls-files", "--stage", "-z"], check=True, capture_output=True, text=True
    ).stdout
    held, folders = {}, {}
    for line in filter(None, listed.split("\0")):
        about, path = line.split("\t", 1)
        held[path] = about
        while path != ".":
            path, name = os.path.dirname(path) or ".", path
            folders.setdefault(path, set()).add(name)
    names = {path: hashlib.sha256("\0".join(sorted(inside)).encode()).hexdigest() for path, inside in folders.items()}
    return held | names


def main(root, record, now):
    record = Path(record)
    known = json.loads(record.read_text()) if record.exists() else {}
    seen = {}
    for path, holds in contents(root).items():
        before, since = known.get(path, (None, None))
        seen[path] = (holds, since if before == holds else now)
    # Before anything is built: what a run that is cut short has built is older than what it was to be built from.
    record.write_text(json.dumps(seen))
    for path, (_, since) in seen.items():
        os.utime(Path(root, path), (since, since), follow_symlinks=False)


if __name__ == "__main__":
    main(".", sys.argv[1], time.time())
