"""Writes the census, or says where it is stale; `tools/census.sh` runs it."""

import sys

from .nixl import Unknown
from .page import PAGE, page
from .rows import census


def main() -> None:
    try:
        text = page(census())
    except Unknown as error:
        sys.exit(f"{error}: the tables of kvferry.vllm.describe.specs and of this program do not name it yet")
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        sys.exit(f"stale: {PAGE}; run tools/census.sh")


if __name__ == "__main__":
    main()
