"""Will this server be able to hand requests over? `python -m kvferry.vllm.doctor P:7000 --kv-transfer-config '{…}'`

Takes what the server is started with and another server's address (the one that its log names), both or either, and
looks at what a request will need: the options, this server's own address and key, its transport, its limits, and
whether the other one is reached, trusts this one and speaks its protocol. `kvferry link` tests the network itself.

Exit codes: 0 nothing is wrong, 1 something is, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from .. import AgentError, Scheduler, __version__
from .options import Options
from .plugin import NAME
from .selfcheck import Finding, graphics, moved

#: Files that a server needs for all the places that its port has for strangers and peers: an eighth and a quarter.
FILES = 8 * 2048
#: With fewer than these, requests fail under load.
FEW_FILES = 4096
ROLES = ("kv_producer", "kv_consumer", "kv_both")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvferry.vllm.doctor",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("peer", nargs="?", metavar="HOST:PORT", help="where another server's agent listens")
    parser.add_argument("--kv-transfer-config", metavar="JSON", help="as `vllm serve` gets it on this machine")
    parser.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help="for an answer of the peer (5)")
    parser.add_argument("--mib", type=int, default=4, help="how much to move within this machine (4)")
    parser.add_argument("--json", action="store_true", help="answer as JSON, for programs")
    asked = parser.parse_args(arguments)
    if asked.peer is None and asked.kv_transfer_config is None:
        parser.error("give HOST:PORT, --kv-transfer-config, or both")
    if asked.mib < 1 or not 1 <= asked.timeout <= 3600:
        said = f"--mib is {asked.mib} and --timeout is {asked.timeout:g}"
        parser.error(f"{said}: both must be 1 or more, the latter 3600 or less")
    findings = []
    for finding in look(asked.kv_transfer_config, asked.peer, asked.timeout, asked.mib):
        findings.append(finding)
        if not asked.json:
            mark = {"yes": "ok", "no": "NO", "-": "--", "?": "??"}[finding.fits]
            print(f"  {mark}  {finding.what:<10} {finding.says}", flush=True)
            if finding.advice:
                print(f"      {'':<10} {finding.advice}", flush=True)
    wrong = [finding for finding in findings if finding.fits == "no"]
    if asked.json:
        report = {"works": not wrong, "release": __version__, "findings": [asdict(one) for one in findings]}
        print(json.dumps(report))
    elif wrong:
        first = wrong[0]
        print(f"\nnot ready: see {', '.join(one.what for one in wrong)}. First: {first.advice or first.says}")
    else:
        print("\nready, as far as can be seen from here")
    return 1 if wrong else 0


def look(given: str | None, peer: str | None, timeout: float = 5.0, mib: int = 4) -> Iterator[Finding]:
    """Everything there is to find, one after the other; nothing that needs what was found to be wrong."""
    options: Options | None = Options()
    if given is not None:
        options, findings = configured(given)
        yield from findings
    if given is not None and options is not None:
        yield listening(options, timeout)
        yield transport(options, mib)
    yield from limits()
    if peer is not None and options is not None:
        yield from reached(peer, options, timeout)


def configured(given: str) -> tuple[Options | None, list[Finding]]:
    """The options, if they are some, and what is to be said of them."""

    def wrong(says: str, advice: str) -> tuple[None, list[Finding]]:
        return None, [Finding("options", "no", says, advice)]

    try:
        config = json.loads(given)
    except ValueError as error:
        return wrong(f"--kv-transfer-config is not JSON: {error}", "quote it as a whole, with ' around and \" within")
    if not isinstance(config, dict):
        return wrong(f"--kv-transfer-config is {config!r}", "give an object, as in README.md")
    connector, role = config.get("kv_connector"), config.get("kv_role")
    if connector != NAME:
        return wrong(f"kv_connector is {connector!r}", f"give \"kv_connector\":\"{NAME}\"")
    if role not in ROLES:
        return wrong(f"kv_role is {role!r}", f"give one of {', '.join(ROLES)}")
    extra = config.get("kv_connector_extra_config", {})
    if not isinstance(extra, Mapping):
        return wrong(f"kv_connector_extra_config is {extra!r}", "give options by their names")
    try:
        options = Options.read(extra)
        options.address(options.port_of(0))
    except (ValueError, ImportError) as error:
        return wrong(str(error), "correct it, and ask again: docs/vllm.md has all options")
    says = f"{NAME}, {role}, " + (", ".join(sorted(extra)) or "all by default")
    findings = [Finding("options", "yes", says)]
    policy = config.get("kv_load_failure_policy", "fail")
    if role != "kv_producer" and policy != "recompute":
        says = f"kv_load_failure_policy is {policy!r}: clients get an error when a transfer fails"
        findings.append(Finding("policy", "-", says, 'give "kv_load_failure_policy":"recompute" in production'))
    return options, findings


def listening(options: Options, timeout: float) -> Finding:
    """This server's own half, at its own address, with its own key or certificates, for a moment."""
    try:
        agent = Scheduler("doctor", **options.address(options.port_of(0)), **options.trust())
    except AgentError as error:
        if "address in use" in str(error):
            return Finding("address", "?", f"{error}: by this server, if it runs", "otherwise choose another 'port'")
        return Finding("address", "no", str(error), "correct the option that the message is about, or its file")
    try:
        if options.tls_certificate is not None:
            said = asked(agent.address, options, timeout)
            if isinstance(said, str):
                says = f"of {agent.address}, as peers are told: {said}"
                advice = "make a certificate of the authority that names this address (subjectAltName) and is valid today"
                return Finding("address", "no" if "TLS" in said else "?", says, advice)
        how = "TLS" if options.tls_certificate else "insecure" if options.insecure else "loopback alone"
        if options.has_key() and how == "loopback alone":
            how = "a key"
        return Finding("address", "yes", f"can listen at {agent.address} ({how})")
    finally:
        agent.close()


def transport(options: Options, mib: int) -> Finding:
    """What caches will go through, between two processes here: libraries, drivers, system calls."""
    device = "cuda:0" if graphics() else "cpu"
    name = options.transport_for(device.split(":")[0])
    if name in ("cuda", "gpu") and device == "cpu":
        says = f"{name} moves GPU memory, and no GPU is seen here"
        return Finding("transport", "no", says, "give it a GPU, or leave 'transport' out")
    return moved(name, device, mib, True)


def limits() -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    says = f"{_count(files)} files may be open"
    if files != resource.RLIM_INFINITY and files < FILES:
        fits = "no" if files < FEW_FILES else "-"
        yield Finding("files", fits, f"{says}, {FILES} are better for many peers", f"raise it: ulimit -n {FILES}")
    else:
        yield Finding("files", "yes", says)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    says = "any memory" if locked == resource.RLIM_INFINITY else f"{locked >> 10} KiB of memory"
    enough = locked == resource.RLIM_INFINITY
    advice = "" if enough else "with RDMA raise it: ulimit -l unlimited. Other transports do not need it"
    yield Finding("locked", "yes" if enough else "-", f"{says} may be locked", advice)


def _count(limit: int) -> str:
    return "any number of" if limit == resource.RLIM_INFINITY else str(limit)


def reached(peer: str, options: Options, timeout: float) -> Iterator[Finding]:
    """The way to another server, step by step, until one fails."""
    host, colon, port = peer.rpartition(":")
    host = host.strip("[]")
    if not (colon and host and port.isascii() and port.isdigit() and 0 < int(port) < 65536) or "/" in host:
        advice = "give host:port, as the other server's log says at its start"
        yield Finding("peer", "no", f"{peer!r} is not an address", advice)
        return
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        yield Finding("peer", "no", f"{host} is not known here: {error}", "correct the name, or give an address")
        return
    addresses = sorted({str(where[0]) for *_, where in found})
    refused = [rule for address in addresses if (rule := forbidden(address, options))]
    if len(refused) == len(addresses):
        yield Finding("peer", "no", *refused[0])
        return
    try:
        with socket.create_connection((host, int(port)), timeout) as connected:
            here = connected.getsockname()[0]
    except TimeoutError:
        advice = f"let TCP connections from here to {peer} through: a firewall drops them, or the host is down"
        yield Finding("peer", "no", f"{peer} does not answer within {timeout:g} s", advice)
        return
    except OSError as error:
        advice = "start that server first, or correct the address: its log says 'listens on' (not the port for HTTP)"
        yield Finding("peer", "no", f"{peer} cannot be connected to: {error.strerror or error}", advice)
        return
    yield Finding("peer", "yes", f"{peer} is reached from {here}")
    said = asked(peer, options, timeout)
    if isinstance(said, str):
        # Without proof, only engines of this machine and user answer a question.
        fits = "?" if options.insecure else "no"
        yield Finding("trust", fits, said, "both servers need the same of 'key_file', TLS or neither")
        return
    says = f"engine {said['engine']!r}, protocol {said['protocol']}, takes this side's word"
    yield Finding("trust", "yes", says)
    if said["draining"]:
        says = "it is being drained: it hands over nothing new"
        yield Finding("ready", "no", says, f"kvferry drain {peer} --undo, if it is to stay")
    elif not said["ranks"]:
        says = "its ranks have not said yet what they hold"
        yield Finding("ready", "?", says, "wait until it has started, and ask again")
    else:
        yield Finding("ready", "yes", f"{said['ranks']} of its ranks can be read")
    says = f"whether {host} reaches the ports of this host, and what the network carries, cannot be seen from one side"
    yield Finding("network", "-", says, f"kvferry link --listen on {host}, and here what it prints")


def forbidden(address: str, options: Options) -> tuple[str, str] | None:
    """Why requests may not lead to an address, and what to do about it."""
    found, no = ipaddress.ip_address(address.partition("%")[0]), f"{address} is not connected to"
    if found.is_link_local or found.is_multicast or found.is_unspecified:
        return f"{no}: a peer's address is never link-local, multicast or unspecified", "give the host's own address"
    if options.peers:
        if any(found in ipaddress.ip_network(network, strict=False) for network in options.peers):
            return None
        return f"{no}: 'peers' names only {', '.join(options.peers)}", "add its network to 'peers'"
    if options.insecure or options.tls_certificate or options.has_key() or found.is_loopback:
        return None
    return f"{no}: without a key or TLS peers are looked for on loopback alone", "give both servers a 'key_file'"


def asked(address: str, options: Options, timeout: float) -> dict[str, Any] | str:
    """What another agent tells `kvferry status`, asked with this server's own proof, or why it tells nothing."""
    proof = {
        "--key-file": options.key_file,
        "--tls-certificate": options.tls_certificate,
        "--tls-key": options.tls_key,
        "--tls-authority": options.tls_authorities,
    }
    words = [word for option, file in proof.items() if file is not None for word in (option, file)]
    patience = str(max(1, round(timeout)))
    run = [sys.executable, "-m", "kvferry", "status", address, "--json", "--timeout", patience, *words]
    try:
        answer = subprocess.run(run, capture_output=True, text=True, timeout=timeout + 30)
    except subprocess.TimeoutExpired:
        return f"{address} does not answer"
    if answer.returncode:
        return answer.stderr.strip().removeprefix("error: ") or f"it ended with {answer.returncode}"
    said: dict[str, Any] = json.loads(answer.stdout)
    return said


if __name__ == "__main__":
    sys.exit(main())
