"""What a client and a router hand in: read back as it was written; what cannot be used is named, and nothing of
theirs is left in what is."""

import json
import pickle
import random
from array import array

import pytest
from kvferry.vllm.params import KEY, ROOM, Offer, Source, admit, check_name, shared_name, shown, to_be_handed_over

TICKET = {
    "engine": "p",
    "address": "[::1]:5600",
    "incarnation": "0123456789abcdef",
    "request": "request-1",
    "nonce": "fedcba9876543210",
    "term_ms": 30_000,
}
OFFER = Offer(TICKET, 70, [[1, 2], [9]], [0, 4])
#: What the longest request of this engine has.
TOKENS = 1000


def params(**changes):
    return OFFER.write("request-1", "[::1]:5600", tp=2, pp=1) | changes


def read(given):
    """As D does; tables that cannot be read are a load that fails."""
    offer = Offer.read(admit(given, TOKENS))
    if offer.wrong is not None:
        assert (offer.blocks, offer.first) == ([], [])
        raise ValueError(offer.wrong)
    return offer


def ours(**changes):
    return params(**{KEY: params()[KEY] | changes})


def nested(depth):
    value = "the innermost"
    for _ in range(depth):
        value = {"a": value} if depth % 2 else [value]
    return value


def test_what_is_written_can_be_read():
    written = params()
    offer = read(json.loads(json.dumps(written)))
    assert [list(table) for table in offer.blocks] == OFFER.blocks
    assert (offer.ticket, offer.tokens, offer.first) == (TICKET, 70, [0, 4])
    assert (written["remote_host"], written["remote_port"]) == ("::1", 5600)
    assert (written["remote_engine_id"], written["remote_request_id"]) == ("p", "request-1")
    assert (written["do_remote_prefill"], written["do_remote_decode"]) == (True, False)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({KEY: None}, "no 'kvferry' in them: the other engine does not run FerryConnector"),
        ({KEY: 5}, "'kvferry' is 5, but must be an object"),
        ({"remote_block_ids": None}, "'remote_block_ids' is missing; a router must pass all"),
        ({"remote_block_ids": []}, "'kvferry.first' has 2 entries, but there are 0 tables"),
        ({"remote_block_ids": 7}, "'remote_block_ids' is 7, but must be a list"),
        ({"remote_block_ids": [1, 2]}, "'remote_block_ids' is 1, but must be a list of block ids for each group"),
        ({"remote_block_ids": [[1], "12"]}, "'remote_block_ids' is '12', but must be a list of block ids"),
        ({"remote_block_ids": [[1], [-1]]}, "'remote_block_ids' has something in it that is no block id"),
        ({"remote_block_ids": [[1], [1 << 32]]}, "'remote_block_ids' has something in it that is no block id"),
        ({"remote_block_ids": [[1], [1.0]]}, "'remote_block_ids' has something in it that is no block id"),
        ({"remote_block_ids": [[1]]}, "'kvferry.first' has 2 entries, but there are 1 tables"),
        ({"remote_block_ids": [[]] * 257}, "must be at most 256 tables"),
        ({"remote_block_ids": [[1] * 9000, []]}, "names 9000 blocks, but 8096 are the most for 1000 tokens"),
        ({"remote_port": 70_000}, "'remote_port' is 70000, but must be from 1 to 65535"),
        ({"remote_port": True}, "'remote_port' is True, but must be a whole number"),
        ({"remote_host": "h" * 2000}, "'remote_host' is 'h.*', but must be text of at most 1024 characters"),
        ({"remote_host": "a\nb"}, r"'remote_host' is 'a\\nb', but must be text that can be printed"),
        ({"tp_size": "2"}, "'tp_size' is '2', but must be a whole number"),
        ({"another's": nested(9)}, "'another's' is nested more than 8 levels deep"),
        ({"another's": nested(1496)}, "'another's' is nested more than 8 levels deep"),
        ({"another's": ["x"] * 10_001}, "more than 10000 values"),
        ({"another's": "x" * 2000}, "must be at most 1024 characters long"),
        ({"x" * 2000: 1}, "a name in kv_transfer_params"),
    ],
)
def test_what_is_wrong_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        read(params(**changes))


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("ticket", None, "'kvferry.ticket' is missing"),
        ("ticket", ["x"] * 99, r"'kvferry.ticket' is \[.{20,60}\], but must be an object"),
        ("tokens", "70", "'kvferry.tokens' is '70', but must be a whole number"),
        ("tokens", True, "'kvferry.tokens' is True, but must be a whole number"),
        ("tokens", 1001, "'kvferry.tokens' is 1001, but must be from 1 to 1000"),
        ("tokens", 0, "'kvferry.tokens' is 0, but must be from 1 to 1000"),
        ("tokens", 1 << 62, "'kvferry.tokens' is .{10,24}, but must be from 1 to 1000"),
        ("first", 0, "'kvferry.first' is 0, but must be a list"),
        ("first", [0, -1], "'kvferry.first' is -1, but must be from 0 to 1000"),
        ("hash", "0" * 31, "'kvferry.hash' is '0*...0*', but must be 32 hexadecimal digits"),
        ("ticket", TICKET | {"nonce": 5}, "'kvferry.ticket.nonce' is 5, but must be text"),
        ("ticket", TICKET | {"nonce": nested(1496)}, "'kvferry.ticket.nonce' is .{1,60}, but must be text"),
        ("ticket", TICKET | {"incarnation": "x" * 16}, "'kvferry.ticket.incarnation' is 'x+', but must be 16 hexa"),
        ("ticket", TICKET | {"address": "\ud800"}, r"'kvferry.ticket.address' is '.ud800', but must be text that"),
        ("ticket", TICKET | {"seal": "0"}, "'kvferry.ticket.seal' is '0', but must be 32 hexadecimal digits"),
        ("prompt", {"tokens": "a\nforged line"}, "'kvferry.prompt.tokens' is .*, but must be 16 hexadecimal digits"),
    ],
)
def test_what_is_wrong_in_our_part_is_named(field, value, message):
    with pytest.raises(ValueError, match=message) as raised:
        read(ours(**{field: value}))
    assert len(str(raised.value)) < 400 and "\n" not in str(raised.value)


def test_nothing_of_the_clients_is_left():
    """Fields that mean nothing are not looked at where they stand in our part, and what another connector may know is
    copied."""
    others = {"remote_kv_source": {"host": "h", "ids": [[1, 2], [3]]}, "weight": 0.5, "empty": None}
    given = params(**others, **{KEY: params()[KEY] | {"unknown": nested(1400)}})
    given[KEY]["ticket"] = TICKET | {"a router's": nested(1400)}
    with pytest.raises(RecursionError):
        pickle.dumps(given)
    admitted = admit(given, TOKENS)
    assert admitted[KEY] == {"ticket": TICKET, "tokens": 70, "first": [0, 4]}
    assert admitted["remote_kv_source"] == others["remote_kv_source"]
    assert admitted["remote_kv_source"] is not others["remote_kv_source"]
    assert admitted["weight"] == 0.5 and "empty" not in admitted
    assert pickle.loads(pickle.dumps(admitted)) == admitted


def test_what_cannot_be_used_is_still_handed_over():
    assert to_be_handed_over({"do_remote_decode": True, "x": nested(1400)}) == {"do_remote_decode": True}
    assert to_be_handed_over({"do_remote_prefill": True}) == to_be_handed_over("text") == {}


def mutated(draw):
    """Parameters as somebody sends them who means harm."""

    def anything(deep=0):
        return draw.choice(
            [
                lambda: draw.choice([None, True, False, 0, -1, 1 << 31, 1 << 63, 10**300, 0.5, float("nan")]),
                lambda: draw.choice(["", "p", "a\r\nb", "\ud800", "\x00", "é" * draw.randrange(3000), "9" * 16]),
                lambda: [anything(deep + 1) for _ in range(draw.randrange(4))] if deep < 4 else nested(40),
                lambda: {str(anything(5)): anything(deep + 1)} if deep < 4 else {},
                lambda: nested(draw.choice([7, 8, 9, 30, 900])),
                lambda: [draw.randrange(1 << 33)] * draw.choice([1, 10, 2000]),
            ]
        )()

    given = params()
    places = [given, given[KEY], given[KEY]["ticket"]]
    given[KEY]["ticket"] = places[2] = dict(TICKET)
    for _ in range(draw.randrange(1, 4)):
        place = draw.choice(places)
        name = draw.choice([*place, "new", "epoch", "seal", "prompt", "hash", "do_remote_decode"])
        match draw.randrange(4):
            case 0:
                place.pop(name, None)
            case 1 if isinstance(place.get(name), list) and place[name]:
                place[name] = [*place[name], anything()]
            case _:
                place[name] = anything()
    return given


def depth(value):
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


def test_100_000_mutations():
    """Each is refused in a short line, or what is let in survives the way to the workers."""
    draw, used = random.Random(29), 0
    for _ in range(100_000):
        given = mutated(draw)
        try:
            admitted = admit(given, TOKENS)
            source = Source.read(admitted)
            offer = None if source else Offer.read(admitted)
        except ValueError as error:
            assert len(str(error)) < 2000 and str(error).isprintable(), error
            continue
        used += 1
        assert depth(admitted) <= 9
        assert len(pickle.dumps((admitted, offer))) < 200_000
        if offer is not None:
            assert all(type(table) is array for table in offer.blocks)
            assert all(type(value) in (str, int) for value in offer.ticket.values())
            # Whatever was let in is of the form that the compiled part takes.
            assert len(offer.first) == len(offer.blocks) and 1 <= offer.tokens <= TOKENS
    assert 5_000 < used < 95_000, used


@pytest.mark.parametrize("name", ["x" * 513, "a\nb", "\ud800", "\x1b[31m"])
def test_names_that_are_none(name):
    with pytest.raises(ValueError, match=r"its name has .*\(X-Request-Id\)"):
        check_name(name)
    assert shown(name).isprintable() and len(shown(name)) < 100
    check_name("cmpl-an ordinary one-0-89abcdef")


def test_what_a_router_leaves_when_it_sends_to_both():
    left = {
        "do_remote_prefill": True,
        "remote_engine_id": "p",
        "remote_host": "::1",
        "remote_port": 5600,
        "tp_size": 2,
        "remote_request_id": "any",
    }
    assert Source.read(admit(left, TOKENS)) == Source("p", "[::1]:5600")
    assert Source.read(left | {"remote_host": "a.b"}) == Source("p", "a.b:5600")
    # Everything is there, or nothing of use: somebody else's matter.
    assert Source.read(params()) is None
    assert Source.read(left | {"remote_block_ids": [[1]]}) is None
    assert Source.read({"do_remote_prefill": True}) is None
    room = {"do_remote_prefill": True, "remote_host": "::1", "remote_port": 8998, ROOM: 2**63 - 1}
    assert Source.read(admit(room, TOKENS)) == Source("", "[::1]:8998", room=2**63 - 1)
    for wrong in ({ROOM: 2**63}, {ROOM: -1}, {ROOM: True}, {ROOM: "1"}, {"remote_port": None}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Source.read(admit(room | wrong, TOKENS))
    # Another direction, and a word to the router.
    assert "transfer_mode" not in params()
    assert OFFER.write("r", "h:1", tp=1, pp=1, push=True)["transfer_mode"] == "push"
    # The engine's word for its address goes with its name.
    sealed = OFFER.write("r", "h:1", tp=1, pp=1, seal="0f" * 16)["remote_engine_id"]
    assert Source.read(left | {"remote_engine_id": sealed}) == Source("p", "[::1]:5600", "0f" * 16)


@pytest.mark.parametrize(
    "request_id, name",
    [
        ("cmpl-___prefill_addr_a:1___decode_addr_b:2_0f-0-89abcdef",
         "cmpl-___prefill_addr_a:1___decode_addr_b:2_0f-0"),
        ("chatcmpl-x-01234567", "chatcmpl-x"),
        # Not what vLLM adds.
        ("chatcmpl-x-0123456", "chatcmpl-x-0123456"),
        ("chatcmpl-x-0123456G", "chatcmpl-x-0123456G"),
        ("01234567", "01234567"),
    ],
)
def test_the_name_that_two_engines_share(request_id, name):
    for origin in (None, b"1" * 16):
        assert shared_name(request_id, 70, origin) == f"{name}:70"


def test_the_name_of_requests_that_each_server_names_for_itself():
    ours, theirs = (shared_name(f"resp_{at}_0-0123abcd", 70, b"1" * 16) for at in "pd")
    assert ours == theirs
    assert shared_name("resp_p_0-0123abcd", 70, b"2" * 16) != ours
    assert shared_name("resp_p_0-0123abcd", 71, b"1" * 16) != ours


def test_answers_go_the_other_way():
    import dataclasses

    answer = dataclasses.replace(OFFER, hash="0" * 32)
    written = answer.write("r", "h:1", tp=1, pp=1)
    assert (written["do_remote_prefill"], written["do_remote_decode"]) == (False, True)
    assert read(written).hash == answer.hash
    with pytest.raises(ValueError, match="'kvferry.hash' is 5, but must be text"):
        read(written | {KEY: written[KEY] | {"hash": 5}})
