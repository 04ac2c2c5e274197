"""`python -m kvferry.vllm.doctor` names whatever is wrong with a server that is to be started, or with another one:
each of its checks, broken on purpose."""

import json
import pathlib
import resource
import socket
import subprocess
import sys

import kvferry
import pytest
from kvferry.vllm import doctor
from kvferry.vllm.selfcheck import Finding

KEY = "the key that both servers hold"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Without bytes that move, but in the one test of these."""
    monkeypatch.delenv("KVFERRY_KEY", raising=False)
    monkeypatch.setattr(doctor, "transport", lambda options, mib: Finding("transport", "yes", "not tried"))


@pytest.fixture
def key_file(tmp_path):
    file = tmp_path / "kvferry.key"
    file.write_text(KEY)
    return str(file)


def config(role="kv_consumer", **extra):
    given = {"kv_connector": "FerryConnector", "kv_role": role, "kv_load_failure_policy": "recompute"}
    # Which address is this machine's own, vLLM knows; these tests need none.
    return json.dumps(given | {"kv_connector_extra_config": {"host": "127.0.0.1"} | extra})


def look(given=None, peer=None, **rest):
    return {one.what: one for one in doctor.look(given, peer, **rest)}


def wrong(found, what, *words):
    """The one finding that is wrong is this one, and has these words; so has the end of what is printed."""
    assert [one.what for one in found.values() if one.fits == "no"] == [what], found
    said = f"{found[what].says} {found[what].advice}"
    for word in words:
        assert word in said, said
    assert found[what].advice


def test_a_server_and_its_peer_that_are_well(engines, key_file, capsys):
    prefill = engines("prefill", 1, 4, key=KEY)
    given = config(key_file=key_file)
    assert doctor.main([prefill.scheduler.address, "--kv-transfer-config", given]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "ready, as far as can be seen from here", lines
    assert doctor.main([prefill.scheduler.address, "--kv-transfer-config", given, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    fits = {one["what"]: one["fits"] for one in report["findings"]}
    assert report["works"] and report["release"] == kvferry.__version__
    for what in ("options", "address", "transport", "files", "peer", "trust", "ready"):
        assert fits[what] in ("yes", "-"), report
    assert fits["network"] == "-"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{'kv_connector': 1}", ["is not JSON"]),
        ("[1]", ["[1]", "give an object"]),
        ('{"kv_connector":"NixlConnector","kv_role":"kv_both"}', ["'NixlConnector'", "FerryConnector"]),
        ('{"kv_connector":"FerryConnector","kv_role":"prefill"}', ["'prefill'", "kv_producer, kv_consumer, kv_both"]),
        (config(prot=7000), ["no option 'prot'", "did you mean 'port'?"]),
        (config(port=70000), ["'port' of kv_connector_extra_config is 70000", "from 0 to 65535"]),
        (config(key_file="/no/such/key"), ["'key_file'", "'/no/such/key'", "a file that can be read"]),
        (config(tls_key=__file__), ["tls_key", "'tls_certificate', which is missing"]),
        (config(host="192.0.2.77"), ["'host'", "'192.0.2.77'", "no network interface here has it"]),
        (config(host="no.such.host.invalid"), ["'host'", "'no.such.host.invalid'"]),
    ],
)
def test_options(given, words):
    wrong(look(given), "options", *words)


def test_an_answer_that_fails_where_it_could_be_computed_is_mentioned():
    given = json.loads(config())
    del given["kv_load_failure_policy"]
    found = look(json.dumps(given))
    assert (found["policy"].fits, "recompute" in found["policy"].advice) == ("-", True)
    assert "policy" not in look(json.dumps(given | {"kv_role": "kv_producer"}))


def test_the_own_address(tmp_path):
    short = tmp_path / "short.key"
    short.write_text("secret")
    wrong(look(config(key_file=str(short))), "address", "a key of 6 bytes is too short")
    wrong(look(config(host="0.0.0.0", advertise="p.example")), "address", "there is no key to keep strangers out")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = look(config(port=port))["address"]
        assert found.fits == "?" and f"127.0.0.1:{port}" in found.says and "by this server, if it runs" in found.says


@pytest.fixture
def certificate(tmp_path):
    """Files of TLS for a host, as the options name them."""

    def make(host, days=1):
        files = {name: str(tmp_path / f"{name}-{host}-{days}.pem") for name in ("tls_certificate", "tls_key", "tls_authorities")}
        root_key = str(tmp_path / "root.key")
        new = ["openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=x"]

        def run(*more):
            subprocess.run([*new, *more], check=True, capture_output=True, timeout=60)

        run("-keyout", root_key, "-out", files["tls_authorities"])
        named = ["-addext", f"subjectAltName=IP:{host}", "-addext", "basicConstraints=critical,CA:FALSE", "-days", str(days)]
        run(*named, "-CA", files["tls_authorities"], "-CAkey", root_key, "-keyout", files["tls_key"], "-out", files["tls_certificate"])
        return files

    return make


def test_certificates(certificate, engines):
    ours = certificate("127.0.0.1")
    assert look(config(**ours))["address"].fits == "yes"
    other = certificate("10.9.9.9")
    wrong(look(config(**other)), "address", "TLS", "127.0.0.1", "subjectAltName")
    mixed = ours | {"tls_key": other["tls_key"]}
    wrong(look(config(**mixed)), "address", "does not belong to the certificate")
    # A peer of another authority.
    theirs = engines("theirs", 1, 4, tls=tuple(other.values()))
    wrong(look(config(**ours), theirs.scheduler.address), "trust", "TLS")


def test_limits(monkeypatch):
    few = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_MEMLOCK: 8 << 20}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (few[which], few[which]))
    found = {one.what: one for one in doctor.limits()}
    wrong(found, "files", "1024 files", "ulimit -n 16384")
    assert found["locked"].fits == "-" and "8192 KiB" in found["locked"].says and "ulimit -l" in found["locked"].advice
    few.update({resource.RLIMIT_NOFILE: resource.RLIM_INFINITY, resource.RLIMIT_MEMLOCK: resource.RLIM_INFINITY})
    assert {one.fits for one in doctor.limits()} == {"yes"}


@pytest.mark.parametrize("peer", ["p", "p:", ":7000", "p:70000", "p:x", "http://p:7000", "p:7000/v1"])
def test_what_is_no_address(peer):
    wrong(look(None, peer), "peer", "is not an address", "host:port")


def test_a_peer_that_is_not_reached(key_file):
    wrong(look(config(), "no.such.host.invalid:7000"), "peer", "no.such.host.invalid is not known here")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    wrong(look(config(), f"127.0.0.1:{port}"), "peer", f"127.0.0.1:{port} cannot be connected to", "Connection refused")
    # What has no room for another connection does not answer at all, as behind a firewall that drops.
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = []
        try:
            for _ in range(20):
                waiting.append(socket.create_connection(full.getsockname(), timeout=0.3))
        except TimeoutError:
            pass
        at = "{}:{}".format(*full.getsockname())
        wrong(look(config(), at, timeout=1), "peer", f"{at} does not answer within 1 s", "a firewall drops them")
    wrong(look(config(), "192.0.2.1:7000"), "peer", "without a key or TLS", "'key_file'")
    wrong(look(config(key_file=key_file), "169.254.169.254:80"), "peer", "never link-local")
    rules = config(key_file=key_file, peers=["10.0.0.0/8"])
    wrong(look(rules, "192.0.2.1:7000"), "peer", "'peers' names only 10.0.0.0/8", "add its network")


def test_a_peer_that_does_not_trust(engines, key_file, tmp_path):
    prefill = engines("prefill", 1, 4, key=KEY)
    at = prefill.scheduler.address
    wrong(look(config(), at), "trust", "the peer expects a shared key, this side has no protection")
    other = tmp_path / "other.key"
    other.write_text("another key of at least sixteen bytes")
    wrong(look(config(key_file=str(other)), at), "trust", "does not hold the same key")
    with socket.create_server(("127.0.0.1", 0)) as web:
        pathlib.Path(key_file).touch()
        at = "{}:{}".format(*web.getsockname())
        wrong(look(config(key_file=key_file), at, timeout=1), "trust", "has not greeted as a kvferry agent does")


def test_a_peer_that_is_not_ready(engines, key_file):
    prefill = engines("prefill", 1, 4, key=KEY)
    at = prefill.scheduler.address
    drain = [sys.executable, "-m", "kvferry", "drain", at, "--key-file", key_file, "--wait", "0"]
    subprocess.run(drain, check=True, capture_output=True, timeout=60)
    wrong(look(config(key_file=key_file), at), "ready", "drained", f"kvferry drain {at} --undo")
    bare = kvferry.Scheduler("bare", key=KEY)
    try:
        found = look(config(key_file=key_file), bare.address)
        assert (found["trust"].fits, found["ready"].fits) == ("yes", "?")
    finally:
        bare.close()


def test_a_transport_that_does_not_work_here(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("KVFERRY_NIXL", "/no/such/nixl")
    wrong(look(config(transport="nixl"), mib=1), "nixl", "/no/such/nixl", "does not work here")
    assert look(config(transport="tcp"), mib=1)["tcp"].fits == "yes"
    if not doctor.graphics():
        wrong(look(config(transport="gpu")), "transport", "no GPU is seen here")


def test_wrong_arguments(capsys):
    for words, says in [([], "give HOST:PORT"), (["p:1", "--mib", "0"], "--mib is 0"), (["p:1", "--timeout", "nan"], "--timeout is nan")]:
        with pytest.raises(SystemExit) as ended:
            doctor.main(words)
        assert ended.value.code == 2 and says in capsys.readouterr().err


def test_the_end_says_what_to_do_first(capsys):
    assert doctor.main(["p", "--kv-transfer-config", config()]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("not ready: see peer. First: give host:port"), last
