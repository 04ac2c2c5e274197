"""What a user can set, whatever the engine: each adds its own, and says where options are written."""

from __future__ import annotations

import difflib
import errno
import ipaddress
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

#: All three, or none.
TLS = ("tls_certificate", "tls_key", "tls_authorities")


def option(default: Any, **valid: Any) -> Any:
    """`least` and `most` for numbers, `others` that will do instead, `one_of` for words, `prefixes`
    that others may begin with, `file` for what must be readable."""
    return field(default=default, metadata=valid)


@dataclass(frozen=True)
class Advanced:
    """What hardly anybody needs to set."""

    #: Requests that a rank reads at once.
    max_concurrent_reads: int = option(64, least=1)
    #: While P computes, D reads ahead whatever takes at least so many seconds; less waits for more.
    min_read_ahead_seconds: float = option(0.002, least=0)
    #: How D reads: by what is cheapest, or always in one way.
    read_method: str = option("auto", one_of=("auto", "direct", "packed"))
    #: Multiprocessors of a GPU that kernels which move blocks may take at most; 0: as many as are of use.
    gpu_max_sms: int = option(0, least=0)
    #: Those kernels, compiled beforehand for a machine without NVRTC.
    gpu_kernel_file: str | None = option(None, file=True)
    #: MiB of a GPU's memory that `nixl` takes at most to pack short runs into, and `tcp` to move its memory through; so does
    #: `gpu`. 0: none: `nixl` reads such runs one by one, and `tcp` moves no GPU memory.
    gpu_staging_mib: int = option(512, least=2, most=1 << 20, others=(0,))


@dataclass(frozen=True)
class Options:
    #: Where they are written, and, by option, what is there instead with this engine.
    WHERE: ClassVar[str]
    ELSEWHERE: ClassVar[Mapping[str, str]] = {}
    #: What else may say this machine's address.
    NAMED_BY: ClassVar[str] = ""

    #: `local` (one host), `tcp` (any network), `nixl` (RDMA, NVLink), `cuda` (GPU memory inside a node, by a kernel) or `gpu`
    #: (for each peer the first that works of `cuda`, `nixl` where both have RDMA, and `tcp`). The same on both sides. Left
    #: out: `gpu` for caches on a GPU, `tcp` for others.
    transport: str | None = option(None, one_of=("local", "tcp", "cuda", "nixl", "gpu"))
    #: The address to listen on; `auto`: this machine's own, as the engine finds it. Left out: `auto` where there is a key or TLS,
    #: 127.0.0.1 otherwise.
    host: str | None = option(None)
    #: The ports that the ranks listen on, from the first to the last of them (`7100-7163`): each takes the first that are
    #: free, one for its tasks and one for each transport that listens. Left out: any free ones.
    data_ports: str | None = option(None, ports=True)
    #: The host to give to peers, where it is not the one to listen on.
    advertise: str | None = option(None)
    #: The file that holds the key that both sides share.
    key_file: str | None = option(None, file=True)
    #: TLS instead of a shared key: this engine's certificate chain, its private key, and the
    #: authorities that peers' certificates must come from. PEM files; all three or none.
    tls_certificate: str | None = option(None, file=True)
    tls_key: str | None = option(None, file=True)
    tls_authorities: str | None = option(None, file=True)
    #: Encrypt what `tcp` moves to and from other hosts, where there is a key or TLS. Off at both ends: it goes as it is.
    encrypt: bool = option(True)
    #: Serve whoever reaches the address.
    insecure: bool = option(False)
    #: The networks (`10.0.0.0/8`, `fd00::/8`) and addresses of the engines that requests may name. Without any:
    #: loopback where there is neither a key nor TLS nor `insecure`, all addresses otherwise; link-local ones never.
    peers: list[str] | None = option(None, networks=True)
    #: Seconds that P keeps a request's blocks without hearing from D.
    lease_seconds: float = option(30.0, least=0.02)
    #: Seconds that D may take to shake hands with a new engine.
    handshake_timeout_seconds: float = option(10.0, least=1e-3)
    #: Seconds that a request may take to load, from when D has blocks for it.
    load_timeout_seconds: float = option(60.0, least=1e-3)
    #: Seconds that a request may wait on D for blocks to be loaded into, while P keeps its own.
    queue_timeout_seconds: float = option(480.0, least=1e-3)
    #: Seconds that D waits for P to hear of a request that was sent to both.
    push_timeout_seconds: float = option(30.0, least=1e-3)
    #: How many requests are compared with what P holds before they are used: `off`, a fraction from 0 to 1,
    #: or `all`. Unless it is `off`, the first ones of every new pair of engines always are.
    audit: float | str = option(0.01, least=0, most=1, others=("off", "all"))
    #: Which engines of other kinds D takes caches from: `shown`, those of models with which that gave the right tokens, or `try`,
    #: also those of others. Then all of D's requests are audited.
    other_engines: str = option("shown", one_of=("shown", "try"))
    #: What to log: `debug` also says where each request's time went.
    logging: str = option("info", one_of=("off", "error", "warning", "info", "debug"))
    advanced: Advanced = option(Advanced())

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Checks every option, and those that go together."""
        advanced = given.get("advanced", {})
        if not isinstance(advanced, Mapping):
            raise cls.error("advanced", advanced, "options by their names")
        made: Self = cls._read(cls, {**given, "advanced": cls._read(Advanced, advanced, "advanced.")})
        made._check_trust()
        return made

    @classmethod
    def _read(cls, kind: Any, given: Mapping[str, Any], prefix: str = "") -> Any:
        """Checks every option of a group. An error names it, what it is, and what it must be."""
        known = {option.name: option for option in fields(kind)}
        for name, value in given.items():
            if not prefix and name in cls.ELSEWHERE:
                raise ValueError(f"{cls.WHERE} has no option '{name}' with this engine: {cls.ELSEWHERE[name]}")
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean '{prefix}{near[0]}'? " if near else ""
                # Which group it belongs to.
                if not prefix and name in {option.name for option in fields(Advanced)}:
                    hint = f"it belongs in 'advanced': {{\"advanced\": {{\"{name}\": …}}}}. "
                raise ValueError(
                    f"{cls.WHERE} has no option '{prefix}{name}': {hint}The options are "
                    f"{', '.join(sorted(prefix + name for name in known))}"
                )
            if wrong := _wrong(value, known[name].default, known[name].metadata):
                raise cls.error(prefix + name, value, wrong)
        return kind(**given)

    @classmethod
    def error(cls, name: str, value: Any, wanted: str) -> ValueError:
        return ValueError(f"the option '{name}' of {cls.WHERE} is {value!r}, but must be {wanted}")

    def _check_trust(self) -> None:
        """One way to trust a peer, and all of it."""
        tls = {name: getattr(self, name) for name in TLS}
        missing = [name for name, path in tls.items() if path is None]
        if len(missing) == len(TLS):
            return
        if missing:
            present = next(name for name in TLS if name not in missing)
            raise self.error(
                present,
                tls[present],
                f"given together with '{missing[0]}', which is missing: TLS takes all of "
                f"{', '.join(TLS)}, or none of them",
            )
        for name in ("key_file", "insecure"):
            if value := getattr(self, name):
                raise self.error(
                    name,
                    value,
                    f"left out when TLS is used (tls_certificate is {self.tls_certificate!r}): leave "
                    f"out either '{name}' or {', '.join(TLS)}",
                )

    def audited(self) -> float:
        """The fraction of requests that are audited."""
        if self.tries_others:
            return 1.0
        return {"off": 0.0, "all": 1.0}[self.audit] if isinstance(self.audit, str) else self.audit

    @property
    def tries_others(self) -> bool:
        """Whether it takes caches from engines of other kinds, whatever the model."""
        return self.other_engines == "try"

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
            raise self.error("host", host, f"{_HOST} (no network interface here has it)")
        host = f"[{host}]" if ":" in host else host
        return {"bind": f"{host}:{port}", "advertise": self.advertise}

    def rank_address(self) -> dict[str, Any]:
        """The arguments of a worker that say where it listens."""
        ports = ports_of(self.data_ports) if self.data_ports else None
        return self.address(0) | {"ports": ports, "encrypt": self.encrypt}

    def resolved(self, host: str) -> list[Any]:
        """What a host stands for. Said here, because the agent knows the option by another name."""
        try:
            return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise self.error("host", host, f"{_HOST} ({error})") from None

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
            raise self.error("host", host, f"an address: this machine's own is not known{self.NAMED_BY}")
        return found

    def _own_address(self) -> str:
        """This machine's, as the engine finds it."""
        raise NotImplementedError


def _wrong(value: Any, default: Any, valid: Mapping[str, Any]) -> str | None:
    """What a value must be, if it is not."""
    if value is None and default is None:
        return None
    if valid.get("ports"):
        wrong = "the first and the last of some ports, as in '7100-7163'"
        return None if isinstance(value, str) and ports_of(value) else wrong
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


def ports_of(value: str) -> tuple[int, int] | None:
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
