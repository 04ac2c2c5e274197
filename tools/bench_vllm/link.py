"""The link between two engines of this machine."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

#: CLONE_NEWNET of the kernel; `os` has it from Python 3.12 on.
NEW_NETWORK = 0x40000000


class Link:
    """This machine's loopback, in a network of its own where a contender wants it slower than it is."""

    def __init__(self, contenders):
        self.rate = None
        if not any("@" in contender for contender in contenders):
            return
        if ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK):
            sys.exit(f"a network of its own, for a link of a given rate: {os.strerror(ctypes.get_errno())}")
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        # No more on its way than fits into a switch: what is said must not wait behind it for long.
        for buffer in ("tcp_rmem", "tcp_wmem"):
            Path(f"/proc/sys/net/ipv4/{buffer}").write_text("4096 131072 262144")

    def carry(self, rate):
        """So many MB/s from now on, or as many as it can."""
        if rate == self.rate:
            return
        if rate is None:
            change = ["del", "dev", "lo", "root"]
        else:
            limit = ["rate", f"{rate * 8}mbit", "burst", "128kb", "latency", "200ms"]
            change = ["replace", "dev", "lo", "root", "tbf", *limit]
        subprocess.run(["tc", "qdisc", *change], check=True)
        self.rate = rate
