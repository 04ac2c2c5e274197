"""What a user can get wrong in `kv_connector_extra_config`."""

import dataclasses
import json
import pathlib
import re

import pytest
from kvferry.vllm.options import Advanced, Options

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "vllm.md"


def test_options_have_defaults_and_are_taken():
    assert Options.read({}).transport is None
    made = Options.read({"transport": "local", "lease_seconds": 5, "port": 5600, "insecure": True})
    assert (made.transport, made.lease_seconds, made.port, made.insecure) == ("local", 5, 5600, True)
    assert made.address(5600) == {"bind": "127.0.0.1:5600", "advertise": None}
    assert Options.read({"host": "::"}).address(1)["bind"] == "[::]:1"
    assert (made.port_of(0), made.port_of(3), Options().port_of(3)) == (5600, 5603, 0)
    assert made.trust() == {"key_file": None, "insecure": True, "peers": []}


def test_networks_of_peers_are_passed_on():
    peers = ["10.0.0.0/8", "fd00::/8", "192.0.2.1"]
    assert Options.read({"peers": peers}).trust()["peers"] == peers
    assert Options.read({"peers": None}).trust()["peers"] == []


def test_an_audit_is_a_word_or_a_fraction():
    given = {"off": 0.0, "all": 1.0, 0.25: 0.25, 0: 0, 1: 1}
    for audit, fraction in given.items():
        assert Options.read({"audit": audit}).audited() == fraction
    assert Options.read({}).audited() == 0.01


def test_memory_to_pack_into_is_none_or_enough():
    for mib in (0, 2, 512):
        assert Options.read({"advanced": {"gpu_staging_mib": mib}}).advanced.gpu_staging_mib == mib


def test_caches_on_a_gpu_go_by_cuda_or_nixl_and_others_by_tcp():
    assert [Options().transport_for(device) for device in ("cpu", "cuda")] == ["tcp", "gpu"]
    asked = Options.read({"transport": "nixl"})
    assert [asked.transport_for(device) for device in ("cpu", "cuda")] == ["nixl", "nixl"]


def test_tls_is_passed_on_when_it_is_asked_for(tls):
    assert Options.read(tls).trust() == {"tls": tuple(tls.values()), "peers": []}
    assert "tls" not in Options.read(dict.fromkeys(tls)).trust()


@pytest.fixture
def tls(tmp_path):
    """Files that exist; what is in them is the agent's to judge."""
    paths = {name: tmp_path / name for name in ("tls_certificate", "tls_key", "tls_authorities")}
    for path in paths.values():
        path.write_text("PEM")
    return {name: str(path) for name, path in paths.items()}


@pytest.mark.parametrize("missing", ["tls_certificate", "tls_key", "tls_authorities"])
def test_tls_takes_all_three_files(tls, missing):
    part = {name: path for name, path in tls.items() if name != missing}
    first = next(iter(part))
    wanted = f"'{first}' .* is '{part[first]}', but must be given together with '{missing}', which is"
    with pytest.raises(ValueError, match=wanted):
        Options.read(part)


def test_there_is_one_way_to_trust(tls):
    for name, value in {"key_file": tls["tls_key"], "insecure": True}.items():
        wanted = f"'{name}' .* is {value!r}, but must be left out when TLS is used.*leave out either"
        with pytest.raises(ValueError, match=wanted):
            Options.read(tls | {name: value})


@pytest.mark.parametrize("name", ["key_file", "tls_certificate", "tls_key", "tls_authorities"])
def test_a_file_that_cannot_be_read_is_named(tls, name):
    given = {"key_file": "/no/such"} if name == "key_file" else tls | {name: "/no/such"}
    wanted = f"'{name}' .* is '/no/such', but must be a file that can be read .*No such file"
    with pytest.raises(ValueError, match=wanted):
        Options.read(given)


def test_a_host_that_is_not_there_is_named():
    options = Options.read({"host": "no such host"})
    with pytest.raises(ValueError, match="'host' .* is 'no such host', but must be an address of this"):
        options.address(0)


def test_a_host_of_another_machine_is_named():
    # An address that no machine has (RFC 5737).
    options = Options.read({"host": "192.0.2.1"})
    wanted = "'host' .* is '192.0.2.1', but must be an address of this .*no network interface here has it"
    with pytest.raises(ValueError, match=wanted):
        options.address(0)


def test_a_port_that_leaves_none_for_other_engines_is_named():
    options = Options.read({"port": 65535})
    wanted = "'port' .* is 65535, but must be 65533 or less: data-parallel engine 2 listens on port 65537"
    with pytest.raises(ValueError, match=wanted):
        options.port_of(2)


def test_the_port_of_an_engine_is_none_of_its_ranks():
    options = Options.read({"port": 7098, "data_ports": "7100-7163"})
    assert options.port_of(1) == 7099
    with pytest.raises(ValueError, match="'data_ports' .* must be other ports than 7100, which 'port' stands for in engine 2"):
        options.port_of(2)
    # Any free one is none of them, or is taken.
    assert Options.read({"data_ports": "7100-7163"}).port_of(2) == 0


@pytest.mark.parametrize(
    "given, message",
    [
        ({"transprot": "tcp"}, "no option 'transprot': did you mean 'transport'"),
        ({"colour": 1}, "The options are advanced, advertise, audit, data_ports, draft, drain_signal, encrypt"),
        ({"lease": 5}, "no option 'lease': did you mean 'lease_s"),
        ({"gpu_max_sms": 8}, "it belongs in 'advanced': {\"advanced\": {\"gpu_max_sms\": …}}"),
        ({"advanced": {"gpu_sms": 8}}, "no option 'advanced.gpu_sms': did you mean 'advanced.gpu_max_sms'"),
        ({"advanced": 8}, "'advanced' .* is 8, but must be options by their names"),
        ({"lease_seconds": "long"}, "'lease_seconds' .* is 'long', but must be a number"),
        ({"port": "5600"}, "'port' .* must be a whole number"),
        ({"port": True}, "'port' .* must be a whole number"),
        ({"insecure": 1}, "'insecure' .* is 1, but must be true or false"),
        ({"key_file": 7}, "'key_file' .* is 7, but must be text, or left out"),
        ({"transport": "pigeon"}, "'pigeon', but must be one of local, tcp, cuda, nixl, gpu"),
        ({"port": 70000}, "'port' .* is 70000, but must be from 0 to 65535"),
        ({"lease_seconds": 0}, "'lease_seconds' .* must be 0.02 or more"),
        ({"load_timeout_seconds": float("nan")}, "'load_timeout_seconds' .* must be 0.001 or more"),
        ({"advanced": {"max_concurrent_reads": 0}}, "'advanced.max_concurrent_reads' .* must be 1 or more"),
        ({"audit": 1.5}, "'audit' .* is 1.5, but must be from 0 to 1, or 'off', or 'all'"),
        ({"audit": "some"}, "'audit' .* is 'some', but must be a number, or 'off', or 'all'"),
        ({"audit": True}, "'audit' .* must be a number, or 'off', or 'all'"),
        ({"advanced": {"gpu_staging_mib": -1}}, "'advanced.gpu_staging_mib' .* is -1, but must be from 2 to 1048576, or 0"),
        # Too little to pack into, which a worker would find out too late.
        ({"advanced": {"gpu_staging_mib": 1}}, "'advanced.gpu_staging_mib' .* is 1, but must be from 2 to 1048576, or 0"),
        ({"advanced": {"gpu_staging_mib": False}}, "'advanced.gpu_staging_mib' .* is False, but must be a whole number, or 0"),
        ({"peers": "10.0.0.0/8"}, "'peers' .* must be networks or addresses, as in"),
        ({"peers": []}, "'peers' .* must be networks or addresses"),
        ({"data_ports": 7100}, "'data_ports' .* must be the first and the last of some ports, as in '7100-7163'"),
        ({"data_ports": "7100"}, "'data_ports' .* must be the first and the last"),
        ({"data_ports": "7163-7100"}, "'data_ports' .* must be the first and the last"),
        ({"data_ports": "0-10"}, "'data_ports' .* must be the first and the last"),
        ({"data_ports": "7100-65536"}, "'data_ports' .* must be the first and the last"),
        ({"data_ports": "٧-٨"}, "'data_ports' .* must be the first and the last"),
        ({"peers": ["10.0.0.0/33"]}, "'peers' .* must be networks or addresses"),
        ({"peers": ["p.example"]}, "'peers' .* must be networks or addresses"),
        ({"peers": [167772160]}, "'peers' .* must be networks or addresses"),
        ({"logging": "loud"}, "'loud', but must be one of off, error"),
    ],
)
def test_wrong_options_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        Options.read(given)


def test_the_page_lists_every_option_with_its_default():
    rows = re.findall(r"^\| `([\w.]+)` \| (?:`(.*?)`)? ?\|", PAGE.read_text(), re.MULTILINE)
    options = [(option.name, option.default) for option in dataclasses.fields(Options) if option.name != "advanced"]
    options += [(f"advanced.{option.name}", option.default) for option in dataclasses.fields(Advanced)]
    defaults = {name: default if isinstance(default, str) else json.dumps(default) for name, default in options}
    assert {name: default or "null" for name, default in rows} == defaults
