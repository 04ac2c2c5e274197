"""Hosts on this machine, and the wire between them (`crates/kvferry-wire`)."""

import contextlib
import ctypes
import json
import os
import select
import subprocess
from dataclasses import dataclass

_LIBC = ctypes.CDLL(None, use_errno=True)
_NETWORK = 0x40000000
#: Seconds for the wire to answer.
_PATIENCE = 20


@dataclass
class Host:
    address: str
    netns: str

    @property
    def enter(self):
        """What stands before a command that is to run there."""
        return ["nsenter", f"--net={self.netns}"]


class Wire:
    """`left`, `right` and a `third`; nothing has to be taken down, whatever happens."""

    def __init__(self, mtu=1500):
        self.process = subprocess.Popen(
            [os.environ["KVFERRY_WIRE"], str(mtu)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        hosts = json.loads(self._line())
        self.left, self.right, self.third = (Host(**hosts[name]) for name in ("left", "right", "third"))

    def _line(self):
        ready, _, _ = select.select([self.process.stdout], [], [], _PATIENCE)
        assert ready, f"the wire does not answer within {_PATIENCE} s"
        line = self.process.stdout.readline()
        assert line, f"the wire ended with {self.process.wait(_PATIENCE)}"
        return line

    def set(self, **weather):
        """From now on; what is not named is fair."""
        self.process.stdin.write(json.dumps(weather) + "\n")
        answer = self._line().strip()
        assert answer == "ok", answer

    def close(self):
        self.process.stdin.close()
        self.process.wait(_PATIENCE)


@contextlib.contextmanager
def on(host):
    """This thread, and those that it starts, use the network of a host."""
    with open("/proc/thread-self/ns/net") as home, open(host.netns) as there:
        _move(there)
        try:
            yield
        finally:
            _move(home)


def _move(namespace):
    if _LIBC.setns(namespace.fileno(), _NETWORK):
        number = ctypes.get_errno()
        raise OSError(number, f"to enter a network namespace: {os.strerror(number)}")
