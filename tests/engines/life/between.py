"""Between D and P's agent, in P's process: somebody who changes what P says of how far a request is, or lets P wait to
hear that something was read. In a next turn the two have changed places.

P's own agent passes nothing on that contradicts what it has said before. What D makes of it must not depend on that.
"""

import io
import re
import socket
import threading
import time
from pathlib import Path

from .inside import side


def _number(message, name):
    """What stands for a question or an answer: its place among all of them."""
    source = Path(__file__).parents[3] / "crates/kvferry-agent/src/wire/message.rs"
    (body,) = re.findall(rf"enum {message} \{{\n(.*?)\n\}}", source.read_text(), re.DOTALL)
    return re.findall(r"^    (\w+)", body, re.MULTILINE).index(name)


#: The answer that says how far a request is, and the question whether what was read counts.
FRONTIER, CONFIRM = _number("Reply", "Frontier"), _number("Question", "Confirm")
#: Bytes that come before whoever asks says anything (`wire/channel.rs`).
GREETING = 9


def fewer_tokens(news):
    return news | {"tokens": news["tokens"] - 64, "in_flight": []}


def fewer_blocks(news):
    """More tokens, in fewer blocks than before."""
    tables = [(first, max(known + len(new) - 1, 0), []) for first, known, new in news["tables"]]
    return news | {"tokens": news["tokens"] + 1, "tables": tables, "in_flight": []}


def other_blocks(news):
    tables = [(first, 0, [1] * (known + len(new))) for first, known, new in news["tables"]]
    return news | {"tokens": news["tokens"] + 1, "tables": tables, "in_flight": []}


def end_of_less(news):
    return fewer_tokens(news) | {"sealed": 1}


def epoch_before(news):
    return other_blocks(news) | {"epoch": news["epoch"] - 1}


def longer_than_the_pool(news):
    """Blocks that there are, again and again; and that is all."""
    return _beyond(news, list(range(1, 64)) * 20) | {"sealed": 1}


def out_of_range(news):
    return _beyond(news, [10**6] * 8)


def far_out_of_range(news):
    return _beyond(news, [2**32 - 1] * 8)


def more_than_the_tables_hold(news):
    return _beyond(news, [])


def more_than_anything_holds(news):
    return more_than_the_tables_hold(news) | {"tokens": 2**64 - 1}


def end_of_more(news):
    return more_than_the_tables_hold(news) | {"sealed": 1}


def _beyond(news, blocks):
    """All of a prompt of 300 tokens, where P has computed 128: the others in these blocks."""
    tables = [(first, known, new + blocks) for first, known, new in news["tables"]]
    return news | {"tokens": news["tokens"] + 172, "tables": tables, "in_flight": []}


class Between:
    """Lets through whatever comes, and changes what D hears as soon as there is a `change`."""

    def __init__(self, address):
        host, _, port = address.rpartition(":")
        self.there = (host, int(port))
        self.change = None
        #: Whether those who have read something are kept waiting, and how many are.
        self.hold, self.held = False, 0
        #: What went wrong in here.
        self.wrong = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.open = [self.listener]
        self._start(self._let_in)

    @property
    def port(self):
        return self.listener.getsockname()[1]

    def close(self):
        for one in self.open:
            _close(one)

    def _start(self, what, *ends):
        threading.Thread(target=self._run, args=(what, ends), daemon=True).start()

    def _run(self, what, ends):
        try:
            what(*ends)
        except OSError:
            # One of the sides has left.
            pass
        except Exception as error:
            self.wrong.append(repr(error))
        for end in ends:
            _close(end)

    def _let_in(self):
        while True:
            asks, _ = self.listener.accept()
            answers = socket.create_connection(self.there)
            for end in (asks, answers):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.open += [asks, answers]
            self._start(self._ask, asks, answers)
            self._start(self._tell, answers, asks)

    def _ask(self, asks, answers):
        heard = asks.makefile("rb")
        answers.sendall(heard.read(GREETING))
        # The first one says who it is.
        welcomed = False
        while len(head := heard.read(4)) == 4:
            said = heard.read(int.from_bytes(head, "little"))
            if welcomed and _is_confirmation(said) and self.hold:
                self.held += 1
                while self.hold:
                    time.sleep(0.005)
            welcomed = True
            answers.sendall(head + said)

    def _tell(self, answers, asks):
        heard = answers.makefile("rb")
        # The first one says who it is.
        welcomed = False
        while len(head := heard.read(4)) == 4:
            said = heard.read(int.from_bytes(head, "little"))
            if welcomed:
                said = self._changed(said)
            welcomed = True
            asks.sendall(len(said).to_bytes(4, "little") + said)

    def _changed(self, said):
        news = _read(said)
        if news is None:
            return said
        assert _write(news) == said, "it is not said as it was"
        change = self.change
        return said if change is None else _write(change(news))


def _close(end):
    try:
        # Whoever waits for it hears of it.
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    end.close()


def _number(said):
    value = at = 0
    while True:
        (byte,) = said.read(1)
        value |= (byte & 127) << at
        at += 7
        if byte < 128:
            return value


def _is_confirmation(said):
    said = io.BytesIO(said)
    _number(said)
    return _number(said) == CONFIRM


def _read(said):
    """What an answer says of how far a request is, if it does (`News`)."""
    said = io.BytesIO(said)

    def number():
        return _number(said)

    def several(one):
        return [one() for _ in range(number())]

    question = number()
    if number() != FRONTIER:
        return None
    return {
        "question": question,
        "incarnation": number(),
        "request": said.read(number()),
        "nonce": number(),
        "epoch": number(),
        "tokens": number(),
        "sealed": number(),
        # Where each begins, how many blocks of it are known, and the others.
        "tables": several(lambda: (number(), number(), several(number))),
        # Steps, and the tokens after them.
        "in_flight": several(lambda: (number(), number())),
        "enclosed": said.read(number()),
    }


def _write(news):
    made = bytearray()

    def number(value):
        while value > 127:
            made.append(value & 127 | 128)
            value >>= 7
        made.append(value)

    number(news["question"])
    number(FRONTIER)
    number(news["incarnation"])
    number(len(news["request"]))
    made.extend(news["request"])
    for name in ("nonce", "epoch", "tokens", "sealed"):
        number(news[name])
    number(len(news["tables"]))
    for first, known, blocks in news["tables"]:
        for value in (first, known, len(blocks), *blocks):
            number(value)
    number(len(news["in_flight"]))
    for step, tokens in news["in_flight"]:
        number(step)
        number(tokens)
    number(len(news["enclosed"]))
    made.extend(news["enclosed"])
    return bytes(made)


#: In P's process.
_between = None


def stand_between(engine):
    """Where D finds P from now on."""
    global _between
    _between = Between(side(engine).agent.address)
    return _between.port


def tell(engine, change):
    """What D hears from now on; None is what P says."""
    _between.change = change


def hold(engine, holds):
    """Whether it keeps waiting who has read something, from now on."""
    _between.hold = holds


def held(engine):
    """How many have read something, and wait."""
    return _between.held


def stand_aside(engine):
    """What went wrong in between."""
    _between.close()
    return _between.wrong
