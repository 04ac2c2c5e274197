"""What a router passes on: read back as it was written, and what cannot be used is named."""

import pytest
from kvferry.vllm.params import KEY, Offer

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
