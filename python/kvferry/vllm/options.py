"""What a user can set in `kv_connector_extra_config`."""

from __future__ import annotations

import difflib
import errno
import ipaddress
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

#: All three, or none.
TLS = ("tls_certificate", "tls_key", "tls_authorities")


def _option(default: Any, **valid: Any) -> Any:
    """`least` and `most` for numbers, `others` that will do instead, `one_of` for words, `prefixes`
    that others may begin with, `file` for what must be readable."""
    return field(default=default, metadata=valid)


def _read(kind: Any, given: Mapping[str, Any], prefix: str = "") -> Any:
    """Checks every option of a group. An error names it, what it is, and what it must be."""
    known = {option.name: option for option in fields(kind)}
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean '{prefix}{near[0]}'? " if near else ""
            # Which group it belongs to.
            if not prefix and name in {option.name for option in fields(Advanced)}:
                hint = f"it belongs in 'advanced': {{\"advanced\": {{\"{name}\": …}}}}. "
            raise ValueError(
                f"kv_connector_extra_config has no option '{prefix}{name}': {hint}The options are "
                f"{', '.join(sorted(prefix + name for name in known))}"
            )
        wrong = _wrong(value, known[name].default, known[name].metadata)
        if wrong:
            raise _error(prefix + name, value, wrong)
    return kind(**given)


@dataclass(frozen=True)
class Advanced:
    """What hardly anybody needs to set."""

    #: Requests that a rank reads at once.
    max_concurrent_reads: int = _option(64, least=1)
    #: While P computes, D reads ahead whatever takes at least so many seconds; less waits for more.
    min_read_ahead_seconds: float = _option(0.002, least=0)
    #: How D reads: by what is cheapest, or always in one way.
    read_method: str = _option("auto", one_of=("auto", "direct", "packed"))
    #: Multiprocessors of a GPU that kernels which move blocks may take at most; 0: as many as are of use.
    gpu_max_sms: int = _option(0, least=0)
    #: Those kernels, compiled beforehand for a machine without NVRTC.
    gpu_kernel_file: str | None = _option(None, file=True)
    #: MiB of a GPU's memory that `nixl` takes at most to pack short runs into, and `tcp` to move its memory through; so does
    #: `gpu`. 0: none: `nixl` reads such runs one by one, and `tcp` moves no GPU memory.
    gpu_staging_mib: int = _option(512, least=2, most=1 << 20, others=(0,))


@dataclass(frozen=True)
class Options:
    #: `local` (one host), `tcp` (any network), `nixl` (RDMA, NVLink), `cuda` (GPU memory inside a node, by a kernel) or `gpu`
    #: (for each peer the first that works of `cuda`, `nixl` where both have RDMA, and `tcp`). The same on both sides. Left
    #: out: `gpu` for caches on a GPU, `tcp` for others.
    transport: str | None = _option(None, one_of=("local", "tcp", "cuda", "nixl", "gpu"))
    #: The address to listen on; `auto`: this machine's own, as vLLM finds it. Left out: `auto` where there is a key or TLS,
    #: 127.0.0.1 otherwise.
    host: str | None = _option(None)
    #: The port to listen on; 0 is any free one. Data-parallel engines count up from it.
    port: int = _option(0, least=0, most=65535)
    #: The ports that the ranks listen on, from the first to the last of them (`7100-7163`): each takes the first that are
    #: free, one for its tasks and one for each transport that listens. Left out: any free ones.
    data_ports: str | None = _option(None, ports=True)
    #: The host to give to peers, where it is not the one to listen on.
    advertise: str | None = _option(None)
    #: The file that holds the key that both sides share.
    key_file: str | None = _option(None, file=True)
    #: TLS instead of a shared key: this engine's certificate chain, its private key, and the
    #: authorities that peers' certificates must come from. PEM files; all three or none.
    tls_certificate: str | None = _option(None, file=True)
    tls_key: str | None = _option(None, file=True)
    tls_authorities: str | None = _option(None, file=True)
    #: Encrypt what `tcp` moves to and from other hosts, where there is a key or TLS. Off at both ends: it goes as it is.
    encrypt: bool = _option(True)
    #: Serve whoever reaches the address.
    insecure: bool = _option(False)
    #: The networks (`10.0.0.0/8`, `fd00::/8`) and addresses of the engines that requests may name. Without any:
    #: loopback where there is neither a key nor TLS nor `insecure`, all addresses otherwise; link-local ones never.
    peers: list[str] | None = _option(None, networks=True)
    #: Seconds that P keeps a request's blocks without hearing from D.
    lease_seconds: float = _option(30.0, least=0.02)
    #: The share of P's blocks that may be kept for D at once; beyond it P hands nothing over. By default all of them: where D
    #: is slow, requests wait, and none fails.
    lease_share: float = _option(1.0, least=0.01, most=1)
    #: Seconds that D may take to shake hands with a new engine.
    handshake_timeout_seconds: float = _option(10.0, least=1e-3)
    #: Seconds that a request may take to load, from when D has blocks for it.
    load_timeout_seconds: float = _option(60.0, least=1e-3)
    #: Seconds that a request may wait on D for blocks to be loaded into, while P keeps its own.
    queue_timeout_seconds: float = _option(480.0, least=1e-3)
    #: Whether P tells the router to send requests to both engines at once, and D reads while P computes:
    #: `auto` is `always`, but for data-parallel engines, one of which a router cannot tell D in advance.
    push: str = _option("never", one_of=("auto", "always", "never"))
    #: Seconds that D waits for P to hear of a request that was sent to both.
    push_timeout_seconds: float = _option(30.0, least=1e-3)
    #: Seconds that D keeps the blocks of an answer, for P to continue from in the next turn; 0: not at
    #: all.
    next_turn_seconds: float = _option(0.0, least=0)
    #: The signal to the engine's process that drains it, as `kvferry drain` does.
    drain_signal: str = _option("none", one_of=("SIGUSR1", "SIGUSR2", "none"))
    #: Whether D also reads from engines with vLLM's own NixlConnector, which cannot confirm: their
    #: `kv_lease_duration`, in seconds (vLLM's default is 30). D's cache then has their layout. 0: not at all.
    nixl_connector_lease_seconds: float = _option(0.0, least=0)
    #: `shared`: both engines run the same draft model, and its states move with the others. `own`: the other
    #: engine runs none, or another one; nothing of the draft moves.
    draft: str = _option("shared", one_of=("shared", "own"))
    #: How many requests are compared with what P holds before they are used: `off`, a fraction from 0 to 1,
    #: or `all`. Unless it is `off`, the first ones of every new pair of engines always are.
    audit: float | str = _option(0.01, least=0, most=1, others=("off", "all"))
    #: Where to send a trace of every request, with OpenTelemetry: `off`, the address of a collector
    #: (`http://HOST:4317`), or `auto`: where vLLM sends its own (`--otlp-traces-endpoint`), if it does.
    trace: str = _option("off", one_of=("off", "auto"), prefixes=("http://", "https://"))
    #: What to log: `debug` also says where each request's time went.
    logging: str = _option("info", one_of=("off", "error", "warning", "info", "debug"))
    advanced: Advanced = _option(Advanced())

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Options:
        """Checks every option, and those that go together."""
        advanced = given.get("advanced", {})
        if not isinstance(advanced, Mapping):
            raise _error("advanced", advanced, "options by their names")
        made: Options = _read(cls, {**given, "advanced": _read(Advanced, advanced, "advanced.")})
        made._check_trust()
        return made

    def _check_trust(self) -> None:
        """One way to trust a peer, and all of it."""
        tls = {name: getattr(self, name) for name in TLS}
        missing = [name for name, path in tls.items() if path is None]
        if len(missing) == len(TLS):
            return
        if missing:
            present = next(name for name in TLS if name not in missing)
            raise _error(
                present,
                tls[present],
                f"given together with '{missing[0]}', which is missing: TLS takes all of "
                f"{', '.join(TLS)}, or none of them",
            )
        for name in ("key_file", "insecure"):
            if value := getattr(self, name):
                raise _error(
                    name,
                    value,
                    f"left out when TLS is used (tls_certificate is {self.tls_certificate!r}): leave "
                    f"out either '{name}' or {', '.join(TLS)}",
                )

    def audited(self) -> float:
        """The fraction of requests that are audited."""
        return {"off": 0.0, "all": 1.0}[self.audit] if isinstance(self.audit, str) else self.audit

    def transport_for(self, device: str) -> str:
        """The transport for caches on this kind of device."""
        return self.transport or ("tcp" if device == "cpu" else "gpu")

    def trust(self) -> dict[str, Any]:
        """The arguments of either half of an agent that say whom it trusts."""
        peers = {"peers": self.peers or []}
        if self.tls_certificate is not None:
            return {"tls": (self.tls_certificate, self.tls_key, self.tls_authorities)} | peers
        return {"key_file": self.key_file, "insecure": self.insecure} | peers

    def address(self, port: int) -> dict[str, Any]:
        """The arguments of either half of an agent that say where it listens."""
        host = self.listens_on()
        if not any(_is_here(family, where) for family, *_, where in self.resolved(host)):
            raise _error("host", host, f"{_HOST} (no network interface here has it)")
        host = f"[{host}]" if ":" in host else host
        return {"bind": f"{host}:{port}", "advertise": self.advertise}

    def rank_address(self) -> dict[str, Any]:
        """The arguments of a worker that say where it listens."""
        ports = _ports(self.data_ports) if self.data_ports else None
        return self.address(0) | {"ports": ports, "encrypt": self.encrypt}

    def resolved(self, host: str) -> list[Any]:
        """What a host stands for. Said here, because the agent knows the option by another name."""
        try:
            return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise _error("host", host, f"{_HOST} ({error})") from None

    def has_key(self) -> bool:
        """Whether peers prove a key."""
        return self.key_file is not None or "KVFERRY_KEY" in os.environ

    def listens_on(self) -> str:
        """Where this process listens, which may be on another machine than other ranks of the engine."""
        proven = self.has_key() or self.tls_certificate is not None
        host = self.host or ("auto" if proven and not self.insecure else "127.0.0.1")
        if host != "auto":
            return host
        found = self._own_address()
        if found in ("", "0.0.0.0", "::"):
            raise _error("host", host, "an address: this machine's own is not known, VLLM_HOST_IP may name it")
        return found

    def _own_address(self) -> str:
        from vllm.utils.network_utils import get_ip

        return str(get_ip())

    def port_of(self, engine: int) -> int:
        """The port of one of several data-parallel engines."""
        port = self.port + engine if self.port else 0
        if port > 65535:
            most = 65535 - engine
            raise _error(
                "port", self.port, f"{most} or less: data-parallel engine {engine} listens on port {port}"
            )
        ranks = _ports(self.data_ports) if self.data_ports else None
        # A rank may come first, and take it.
        if ranks and ranks[0] <= port <= ranks[1]:
            raise _error("data_ports", self.data_ports, f"other ports than {port}, which 'port' stands for in engine {engine}")
        return port


def _wrong(value: Any, default: Any, valid: Mapping[str, Any]) -> str | None:
    """What a value must be, if it is not."""
    if value is None and default is None:
        return None
    if valid.get("ports"):
        wrong = "the first and the last of some ports, as in '7100-7163'"
        return None if isinstance(value, str) and _ports(value) else wrong
    if valid.get("networks"):
        wrong = "networks or addresses, as in ['10.0.0.0/8', 'fd00::/8']"
        return None if isinstance(value, list) and value and all(map(_is_network, value)) else wrong
    wanted = str if default is None else type(default)
    # To Python 0, 0.0 and False are the same.
    if any(type(value) is type(other) and value == other for other in valid.get("others", ())):
        return None
    # In JSON 5 is as good as 5.0; and True is not a number, although Python takes it for one.
    fits = isinstance(value, (int, float) if wanted is float else wanted)
    if not fits or (isinstance(value, bool) and wanted is not bool):
        return _KINDS[wanted] + _or(valid) + (", or left out" if default is None else "")
    if "one_of" in valid and value not in valid["one_of"]:
        prefixes = valid.get("prefixes", ())
        if any(value.startswith(prefix) and value != prefix for prefix in prefixes):
            return None
        more = f", or begin with {' or '.join(prefixes)}" if prefixes else ""
        return f"one of {', '.join(valid['one_of'])}{more}"
    least, most = valid.get("least", -math.inf), valid.get("most", math.inf)
    if "least" in valid and not (least <= value <= most and value < math.inf):
        return (f"{least} or more" if most == math.inf else f"from {least} to {most}") + _or(valid)
    if valid.get("file"):
        try:
            open(value, "rb").close()
        except (OSError, ValueError) as error:
            return f"a file that can be read on this machine ({getattr(error, 'strerror', error)})"
    return None


def _is_here(family: int, where: tuple[Any, ...]) -> bool:
    """Whether an address is one of this machine's. What else can be wrong with it shows when it is listened on."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.bind((where[0], 0, *where[2:]))
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True


def _ports(value: str) -> tuple[int, int] | None:
    """The first and the last port of a range."""
    numbers = value.split("-")
    if len(numbers) != 2 or not all(number.isascii() and number.isdigit() for number in numbers):
        return None
    first, last = map(int, numbers)
    return (first, last) if 0 < first <= last < 65536 else None


def _is_network(value: Any) -> bool:
    try:
        ipaddress.ip_network(value, strict=False)
    except ValueError:
        return False
    return isinstance(value, str)


def _or(valid: Mapping[str, Any]) -> str:
    return "".join(f", or {other!r}" for other in valid.get("others", ()))


_HOST = "an address of this machine, a name that stands for one, or 'auto'"
_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _error(name: str, value: Any, wanted: str) -> ValueError:
    return ValueError(
        f"the option '{name}' of kv_connector_extra_config is {value!r}, but must be {wanted}"
    )
