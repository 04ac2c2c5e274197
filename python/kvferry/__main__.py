"""The `kvferry` command, as the wheel brings it: what it does is in the compiled part."""

import signal
import sys

from ._core import command


def main() -> None:
    # What is compiled does not ask Python about signals.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(command(["kvferry", *sys.argv[1:]], [sys.executable, "-m", "kvferry"]))


if __name__ == "__main__":
    main()
