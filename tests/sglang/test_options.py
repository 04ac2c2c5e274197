"""What a user can get wrong in `KVFERRY_OPTIONS`, and what the page says of it."""

import dataclasses
from pathlib import Path

import pytest
from kvferry.sglang.options import ELSEWHERE, VARIABLE, Options

PAGE = (Path(__file__).parents[2] / "docs" / "sglang.md").read_text()


def test_options_are_those_of_vllms_connector_where_both_have_them(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Options.of_environment() == Options()
    monkeypatch.setenv(VARIABLE, '{"lease_seconds": 5, "pages": "early", "advanced": {"read_method": "packed"}}')
    made = Options.of_environment()
    assert (made.lease_seconds, made.pages, made.advanced.read_method) == (5, "early", "packed")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "KVFERRY_OPTIONS is not JSON"),
        ("[1]", "must be options by their names"),
        ('{"lease": 5}', "KVFERRY_OPTIONS has no option 'lease': did you mean 'lease_seconds'|no option 'lease': The options are .*lease_seconds"),
        ('{"lease_seconds": 0}', "'lease_seconds' of KVFERRY_OPTIONS is 0, but must be 0.02 or more"),
        ('{"pages": "soon"}', "'pages' of KVFERRY_OPTIONS is 'soon', but must be one of late, early"),
        ('{"port": 1}', "with this engine: SGLang's --disaggregation-bootstrap-port"),
    ],
)
def test_what_is_wrong_is_said(monkeypatch, text, words):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match=words):
        Options.of_environment()


def test_the_page_has_every_option():
    section = PAGE.split("## Options")[1].split("## ")[0]
    for option in dataclasses.fields(Options):
        assert (f"`{option.name}`" in section) == (option.name not in ELSEWHERE), option.name
