"""What a router passes on: read back as it was written, and what cannot be used is named."""

import pytest
from kvferry.vllm.params import KEY, Offer, Source, shared_name

OFFER = Offer({"engine": "p", "nonce": "1"}, 70, [[1, 2], [9]], [0, 4])


def params(**changes):
    return OFFER.write("request-1", "[::1]:5600", tp=2, pp=1) | changes


def test_what_is_written_can_be_read():
    written = params()
    assert Offer.read(written) == OFFER
    assert (written["remote_host"], written["remote_port"]) == ("::1", 5600)
    assert (written["remote_engine_id"], written["remote_request_id"]) == ("p", "request-1")
    assert (written["do_remote_prefill"], written["do_remote_decode"]) == (True, False)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({KEY: None}, "no 'kvferry' in them: the other engine does not run FerryConnector"),
        ({KEY: 5}, "'kvferry' is 5, but must be an object"),
        ({"remote_block_ids": None}, "'remote_block_ids' is missing; a router must pass all"),
        ({"remote_block_ids": 7}, "'remote_block_ids' is 7, but must be a list"),
    ],
)
def test_what_is_wrong_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        Offer.read(params(**changes))


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("ticket", None, "'kvferry.ticket' is missing"),
        ("ticket", ["x"] * 99, "'kvferry.ticket' is .{60}…, but must be an object"),
        ("tokens", "70", "'kvferry.tokens' is '70', but must be a whole number"),
        ("tokens", True, "'kvferry.tokens' is True, but must be a whole number"),
        ("first", 0, "'kvferry.first' is 0, but must be a list"),
    ],
)
def test_what_is_wrong_in_our_part_is_named(field, value, message):
    given = params()
    with pytest.raises(ValueError, match=message):
        Offer.read(given | {KEY: given[KEY] | {field: value}})


def test_what_a_router_leaves_when_it_sends_to_both():
    left = {
        "do_remote_prefill": True,
        "remote_engine_id": "p",
        "remote_host": "::1",
        "remote_port": 5600,
        "tp_size": 2,
        "remote_request_id": "any",
    }
    assert Source.read(left) == Source("p", "[::1]:5600")
    assert Source.read(left | {"remote_host": "a.b"}) == Source("p", "a.b:5600")
    # Everything is there, or nothing of use: somebody else's matter.
    assert Source.read(params()) is None
    assert Source.read(left | {"remote_block_ids": [[1]]}) is None
    assert Source.read({"do_remote_prefill": True}) is None
    with pytest.raises(ValueError, match="'remote_port' is 'x', but must be a whole number"):
        Source.read(left | {"remote_port": "x"})
    # Another direction, and a word to the router.
    assert "transfer_mode" not in params()
    assert OFFER.write("r", "h:1", tp=1, pp=1, push=True)["transfer_mode"] == "push"


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
    assert Offer.read(written) == answer
    with pytest.raises(ValueError, match="'kvferry.hash' is 5, but must be text"):
        Offer.read(written | {KEY: written[KEY] | {"hash": 5}})
