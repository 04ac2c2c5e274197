"""Who is let in: by a key, by certificates, and by those of the page on operations."""

import pathlib
import re
import subprocess
import uuid

import kvferry
import pytest
from handmade import LONG, fill, grant, load, value


def test_strangers_learn_nothing(engines):
    prefill = engines("prefill", 1, 4, key="a secret that only both sides know")
    decode = engines("decode", 1, 4, key="another secret, which is not theirs")
    ticket = grant(prefill, "request")
    facts = dict(tokens=4, source_blocks=[[1]], destination_blocks=[[1]])
    (ending,) = load(decode, "request", ticket, **facts)
    assert ending.outcome == "failed"
    assert (decode.pools[0] == 0).all()


@pytest.fixture
def certificates(tmp_path):
    """Makes certificates for 127.0.0.1 of an authority of their own: certificate, key, authority."""

    def openssl(*args):
        subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True, timeout=60)

    def make(name):
        files = {what: tmp_path / f"{name}-{what}.pem" for what in ("own", "key", "root", "root-key")}
        new = ["req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        openssl(*new, "-subj", f"/CN={name}", "-keyout", files["root-key"], "-out", files["root"])
        openssl(
            *new,
            *("-subj", "/CN=engine", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
            *("-CA", files["root"], "-CAkey", files["root-key"]),
            *("-keyout", files["key"], "-out", files["own"]),
        )
        return files["own"], files["key"], files["root"]

    return make


def test_certificates_instead_of_a_key(engines, certificates):
    ours, theirs = certificates("ours"), certificates("theirs")
    facts = dict(tokens=4, source_blocks=[[7]], destination_blocks=[[3]])
    prefill, decode = engines("prefill", 1, 4, tls=ours), engines("decode", 2, 8, tls=ours)
    fill(prefill, [7], 4)
    endings = load(decode, "request", grant(prefill, "request", **facts), **facts)
    assert [(e.outcome, e.reason) for e in endings] == [("done", "")] * 2
    assert decode.pools[1][(3 * 8 + 3) * 2 + 1] == value(3, 3)
    assert prefill.scheduler.released(LONG) == [("request", "confirmed")]
    # A certificate of another authority is not let in, nor is a key or nothing at all.
    for name, trust in [("other", dict(tls=theirs)), ("key", dict(key=uuid.uuid4().hex)), ("none", {})]:
        stranger = engines(name, 1, 4, **trust)
        ticket = grant(prefill, name, **facts)
        stranger.workers[0].load(name, ticket, deadline=1.0, **facts)
        (ending,) = stranger.workers[0].endings(LONG)
        assert ending.outcome == "failed", name
        assert (stranger.pools[0] == 0).all()


def test_the_certificates_of_the_page_on_operations(engines, tmp_path):
    page = (pathlib.Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    (commands,) = re.findall(r"```sh\n(# Once, .*?)```", page, re.DOTALL)
    files = ("server.pem", "server.key", "authority.pem")

    def made(name):
        folder = tmp_path / name
        folder.mkdir()
        script = "set -e\n" + commands.replace("10.0.0.5", "127.0.0.1")
        subprocess.run(["sh", "-c", script], cwd=folder, check=True, capture_output=True, timeout=60)
        return tuple(folder / file for file in files)

    facts = dict(tokens=4, source_blocks=[[7]], destination_blocks=[[3]])
    before, after = made("before"), made("after")
    prefill, decode = engines("prefill", 1, 4, tls=before), engines("decode", 1, 4, tls=before)
    (ending,) = load(decode, "request", grant(prefill, "request", **facts), **facts)
    assert (ending.outcome, ending.reason) == ("done", "")
    # While an authority is replaced, both are believed.
    both = tmp_path / "both.pem"
    both.write_text(before[2].read_text() + after[2].read_text())
    older = engines("older", 1, 4, tls=(*before[:2], both))
    newer = engines("newer", 1, 4, tls=(*after[:2], both))
    for number, (source, reader) in enumerate([(older, newer), (newer, older)]):
        name = f"r{number}"
        (ending,) = load(reader, name, grant(source, name, **facts), **facts)
        assert (ending.outcome, ending.reason) == ("done", "")


def test_certificates_that_cannot_be_used(certificates, tmp_path):
    own, key, root = certificates("ours")
    _, other, _ = certificates("theirs")
    for tls, problem in [
        ((tmp_path / "none.pem", key, root), f"cannot use {tmp_path}/none.pem: .*No such file"),
        ((own, tmp_path / "none.pem", root), f"cannot use {tmp_path}/none.pem: .*No such file"),
        ((own, key, key), f"cannot use {key}: it holds no certificate"),
        ((own, own, root), f"cannot use {own}: "),
        ((own, other, root), f"the private key in {other} does not belong to the certificate in {own}"),
    ]:
        with pytest.raises(kvferry.AgentError, match=problem) as caught:
            kvferry.Scheduler("d", tls=tls)
        assert caught.value.kind == "key"
    with pytest.raises(kvferry.AgentError, match="only one of key, key_file, tls and insecure") as caught:
        kvferry.Scheduler("d", key=uuid.uuid4().hex, tls=(own, key, root))
    assert caught.value.kind == "options"
    with pytest.raises((TypeError, ValueError)):
        kvferry.Scheduler("d", tls=(own, key))
