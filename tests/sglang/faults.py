"""What is done to an engine's process before it starts: for controls, and for faults that must show."""

import functools
import os
import signal


def any_prompt():
    """P and D take a request for the same by its room alone, whatever they were given."""
    from kvferry.sglang import receiver, sender

    receiver.origin_of = sender.origin_of = lambda _: bytes(16)


def spoiled(source):
    """D: one bit of what was read is another, in the first block of the table that comes from there."""
    from kvferry.sglang.manager import Manager

    given = Manager.zero

    def zero(manager, ending):
        given(manager, ending)
        facts = manager.manifest.to_dict()
        at = next(at for at, table in enumerate(manager.tables) if table.source == source)
        block = int(manager.followed[ending.request].tables[at][0])
        view = facts["groups"][at]["pieces"][0]["view"]
        base = facts["regions"][view["region"]]["base"]
        # The highest bits of the numbers, which are exponents.
        for number in range(3, view["block"], 4):
            _flip(manager.storages, base + view["offset"] + block * view["block"] + number)

    Manager.zero = zero


def _flip(storages, address):
    for storage in storages:
        if 0 <= (at := address - storage.data_ptr()) < storage.numel():
            storage[at] ^= 1 << 5


def slow(seconds):
    """D: a load takes so long to be started."""
    import threading

    from kvferry.sglang.receiver import Receiver

    given = Receiver.start

    def start(receiver, load):
        print(f"room {receiver.room} waits", flush=True)
        threading.Timer(seconds, given, (receiver, load)).start()

    Receiver.start = start


def dies_when_it_reads():
    """D: at once, when a load is to be started."""
    from kvferry.sglang.receiver import Receiver

    Receiver.start = lambda *_: os.killpg(os.getpgrp(), signal.SIGKILL)


def another_version():
    """An SGLang of which nobody knows anything, and in which something has moved."""
    import sglang

    sglang.__version__ = "0.6.0"


def moved():
    from sglang.srt.disaggregation.decode import DecodePreallocQueue

    del DecodePreallocQueue._create_receiver_and_enqueue


def nothing_shown():
    """No family of which another kind of engine was shown to take the cache."""
    from kvferry import _identity

    _identity.SHOWN = {}
