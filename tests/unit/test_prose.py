"""Words that only we use are found, in prose and nowhere else."""

from test_tools import TOOLS, tool


def test_private_words_are_found_where_they_are():
    prose = tool("prose")
    page = "# A\nD reads\nwhat P hands\nover, and Nobody hears\nof it. The address is no\naddress. There is no word for it.\n"
    found = [(line, words) for line, words, _ in prose.private(page)]
    assert found == [(2, "D"), (3, "P"), (3, "hands over"), (4, "Nobody"), (4, "hears of"), (5, "is no address")]


def test_what_is_quoted_is_left_alone():
    prose = tool("prose")
    page = (
        "The prefill server (P), `P hands over`, [a link](handover.rs#nobody)\n"
        "```sh\nnobody hands over\n```\n<!-- somebody -->\nOne nobody.\n"
    )
    assert [(line, words) for line, words, _ in prose.private(page)] == [(6, "nobody")]


def test_pages_are_found_and_what_is_wrong_is_named(tmp_path, monkeypatch, capsys):
    prose = tool("prose")
    assert prose.ROOT == TOOLS.parent and all(list(prose.ROOT.glob(page)) for page in prose.PAGES)
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "good.md").write_text("A transfer.\n")
    assert not prose.main("*.md")
    (tmp_path / "bad.md").write_text("A\nhand-over.\n")
    assert prose.main("*.md")
    assert capsys.readouterr().out.endswith("bad.md:2: 'hand-over': say instead: transfer\nprose: 2 pages, 1 problems\n")
