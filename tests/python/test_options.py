"""What a user can get wrong in `kv_connector_extra_config`."""

import dataclasses
import json
import pathlib
import re

import pytest
from kvferry.vllm.options import Options

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "vllm.md"


def test_options_have_defaults_and_are_taken():
    assert Options.read({}).transport is None
    made = Options.read({"transport": "local", "lease": 5, "port": 5600, "insecure": True})
    assert (made.transport, made.lease, made.port, made.insecure) == ("local", 5, 5600, True)
    assert made.bind(5600) == "127.0.0.1:5600"
    assert Options.read({"host": "::1"}).bind(1) == "[::1]:1"


@pytest.mark.parametrize(
    "given, message",
    [
        ({"transprot": "tcp"}, "no option 'transprot': did you mean 'transport'"),
        ({"colour": 1}, "the options are advertise, concurrent, deadline"),
        ({"lease": "long"}, "'lease' .* is 'long', which should be float"),
        ({"port": "5600"}, "'port' .* should be int"),
        ({"port": True}, "'port' .* should be int"),
        ({"insecure": 1}, "'insecure' .* should be bool"),
        ({"key_file": 7}, "'key_file' .* should be str or nothing"),
        ({"transport": "pigeon"}, "'pigeon', which should be one of local, tcp, nixl"),
        ({"port": 70000}, "'port' .* should be from 0 to 65535"),
        ({"lease": 0}, "'lease' .* should be 0.02 or more"),
        ({"deadline": float("nan")}, "'deadline' .* should be 0.001 or more"),
        ({"concurrent": 0}, "'concurrent' .* should be 1 or more"),
        ({"logging": "loud"}, "'loud', which should be one of off, error"),
    ],
)
def test_wrong_options_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        Options.read(given)


def test_the_page_lists_every_option_with_its_default():
    rows = re.findall(r"^\| `(\w+)` \| (?:`(.*?)`)? ?\|", PAGE.read_text(), re.MULTILINE)
    defaults = {
        option.name: option.default if isinstance(option.default, str) else json.dumps(option.default)
        for option in dataclasses.fields(Options)
    }
    assert {name: default or "null" for name, default in rows} == defaults
