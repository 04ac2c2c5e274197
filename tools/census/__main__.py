"""Writes the census, or says where it is stale; `tools/census.sh` runs it."""

import sys

from .nixl import Unknown
from .page import written


def main() -> None:
    try:
        files = written()
    except Unknown as error:
        sys.exit(f"{error}: the tables of kvferry.vllm.specs and of this program do not name it yet")
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    if sys.argv[1:] == ["--check"]:
        if stale:
            sys.exit(f"stale: {', '.join(map(str, stale))}; run tools/census.sh")
        return
    for path in stale:
        path.write_text(files[path])


if __name__ == "__main__":
    main()
