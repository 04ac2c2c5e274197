import builtins
import os
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

__all__ = [
    "Bell",
    "Ending",
    "Manifest",
    "Plan",
    "Scheduler",
    "Summary",
    "Worker",
    "command",
    "compile",
    "facts",
    "finish",
    "introduce",
    "log_level",
    "log_lines",
    "metrics",
    "solve",
    "states",
    "version",
]

_Numbers = Sequence[int] | npt.NDArray[np.integer[Any]]
_Words = npt.NDArray[np.uint64]
_Path = str | os.PathLike[str]

def version() -> str:
    """The version of the compiled part."""

def command(words: list[str], program: list[str]) -> int:
    """What the `kvferry` command does for these words, of which the first is its name; the exit code. `program` is what
    starts it again."""

def finish() -> None:
    """Waits until no kernel is compiled, at most 20 s, and lets none be compiled any more: for a process that ends."""

def facts() -> dict[str, Any]:
    """Everything that is known of states and families, as plain data: `formats`, `identity` (the keys
    of a manifest's identity), `kinds` (of states), `modules` and `families`."""

def solve(
    kind: str,
    shapes: Sequence[Sequence[int]],
    told: Mapping[str, int],
    *,
    ranks: int,
) -> dict[str, int]:
    """The sizes of a kind of states in the whole model, as far as one of `ranks` tensor-parallel ranks
    tells them.

    `shapes` are those of its tensors on the rank; of a convolution: all channels, live columns. `told`
    are sizes that are known already. A size that does not follow from these is left out. Raises
    `ValueError` when they do not fit each other, naming the kind."""

def states(
    kind: str,
    sizes: Mapping[str, int],
    formats: Mapping[str, tuple[str, int]],
    *,
    rank: int,
    ranks: int,
) -> list[dict[str, Any]]:
    """The tensors of a kind of states and what one tensor-parallel rank of `ranks` holds of them.

    `sizes` are those of the whole model, by the names that the kind has for them; `formats` are names
    and bytes by role. Each tensor has `packing` (`plain`, `planes` or `convolution`), `spare` (whether
    columns for speculative tokens stand behind the live ones), and `states`: `name` without a layer,
    `kind` and `bounds` as in a manifest. Raises `ValueError` when the sizes do not fit the kind.
    """

def log_level(level: str) -> None:
    """What is less important than `level` (`off`, `error`, `warning`, `info` or `debug`) is not said.
    `kvferry.log_to` hands what is said to Python's `logging`."""

def log_lines(timeout: float = 0.0) -> list[tuple[int, str]]:
    """What has been said since the last call, each line with its level as `logging` numbers them.
    Waits for the first of them."""

def metrics() -> dict[str, dict[str, str]]:
    """What is counted and measured: names and what they mean, in order, by section. `counters` are
    those of `Scheduler.counts`, `worker_counters` those of `Worker.counts`, `timings` those of
    `Ending.seconds`, `outcomes` those of `Ending.outcome` (of loads that ended), `failures` those of
    `Ending.kind`."""

@final
class Manifest:
    """All the facts of one rank: regions, groups, and at which bytes each state lies.

    Whatever a manifest says has been checked: every view lies in its region, no two pieces of a group
    share a byte, and groups that share memory agree on every byte's block.
    """

    def __new__(cls, draft: dict[str, Any]) -> Manifest:
        """Checks a draft, in the shape of `to_dict`. Raises `ManifestError`, naming the place."""

    @staticmethod
    def from_json(text: str) -> Manifest: ...
    @staticmethod
    def from_bytes(data: bytes) -> Manifest:
        """Decodes and checks the compact form. Safe on any bytes."""

    def to_json(self) -> str:
        """The readable form."""

    def to_bytes(self) -> bytes:
        """The compact form: kilobytes for a hundred layers, whatever the number of blocks."""

    def to_dict(self) -> dict[str, Any]:
        """The facts, to be changed and checked again."""

    @property
    def engine(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def label(self) -> str: ...
    @property
    def identity(self) -> Mapping[str, str]: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

@final
class Summary:
    """What the copies of a request from one source rank amount to."""

    @property
    def bytes(self) -> int: ...
    @property
    def copies(self) -> int: ...
    @property
    def shortest(self) -> int: ...
    @property
    def longest(self) -> int: ...
    @property
    def mean(self) -> float: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

@final
class Plan:
    """What one destination rank does, for any request.

    The methods take a request by keyword. `source_blocks` and `destination_blocks` hold one block
    table for every KV-cache group of that side, indexed by position: entry 0 holds the first tokens,
    and the group's null block (0 in vLLM) marks a dead entry. A table that was clipped says with which
    position it starts in `source_first` or `destination_first` (all 0 when left out). The table of a
    group of per-sequence states is its one running slot. `cached` says for every destination group how
    many of the first tokens it holds already (none when left out); a state group holds all of them or
    is moved whole.

    Every method raises `RequestError` when the request does not fit.
    """

    @property
    def sources(self) -> int:
        """How many source ranks the plan was compiled from."""

    @property
    def windowed(self) -> list[tuple[int, int]]:
        """Group and index of the destination pieces that get less than their group keeps, because the
        source keeps no more: only what the model looks back at after the whole request. Blocks with
        such pieces must not serve as the cached prefix of another, shorter request."""

    def reads(self, source: int) -> bool:
        """Whether anything is read from a source rank."""

    def copies(
        self,
        *,
        tokens: int,
        source_blocks: Sequence[_Numbers],
        destination_blocks: Sequence[_Numbers],
        cached: _Numbers | None = None,
        source_first: _Numbers | None = None,
        destination_first: _Numbers | None = None,
    ) -> list[_Words]:
        """For every source rank, in the order given to `compile`, an array of shape (n, 3):
        source address, destination address, length in bytes."""

    def rest(
        self,
        *,
        tokens: int,
        source_blocks: Sequence[_Numbers],
        destination_blocks: Sequence[_Numbers],
        cached: _Numbers | None = None,
        source_first: _Numbers | None = None,
        destination_first: _Numbers | None = None,
    ) -> _Words:
        """What no copy writes of the request's own destination blocks, for engines that want it
        zeroed: an array of shape (n, 2) of address and length."""

    def summary(
        self,
        *,
        tokens: int,
        source_blocks: Sequence[_Numbers],
        destination_blocks: Sequence[_Numbers],
        cached: _Numbers | None = None,
        source_first: _Numbers | None = None,
        destination_first: _Numbers | None = None,
    ) -> list[Summary]:
        """What the copies from every source rank amount to, without making them."""

def compile(destination: Manifest, sources: Sequence[Manifest]) -> Plan:
    """The plan of one destination rank, proven; `sources` are all ranks of the other side. Raises
    `Incompatible` when the two sides do not fit."""

@final
class Scheduler:
    """The half of an agent that lives where an engine owns its blocks.

    As a source it listens on the engine's one address, makes known what its ranks hold, and keeps the
    leases of finished requests. As a destination it keeps alive the leases of requests that wait.
    Tickets are plain dictionaries, which survive JSON.
    """

    def __new__(
        cls,
        engine: str,
        *,
        bind: str = "127.0.0.1:0",
        advertise: str | None = None,
        key: str | None = None,
        key_file: _Path | None = None,
        tls: tuple[_Path, _Path, _Path] | None = None,
        insecure: bool = False,
        peers: Sequence[str] = ...,
        lease: float = 30.0,
        longest: float = 1800.0,
    ) -> Scheduler:
        """Starts to listen. Without a key (given, in a file, or in KVFERRY_KEY) or `tls` only loopback
        addresses are served, unless `insecure`. Times are in seconds. Raises `AgentError`.

        `tls` are the paths of three PEM files, instead of a key: this side's certificate (with those
        between it and the authority), its private key, and the authorities that peers' certificates
        must come from. A peer's certificate must also name the host that it is reached by.

        Tickets may name only addresses in `peers` (networks such as `10.0.0.0/8` and `fd00::/8`, or single
        addresses). Without any: loopback, where there is neither a key nor `tls` nor `insecure`; otherwise all
        addresses. Link-local ones never."""

    @property
    def address(self) -> str:
        """Where peers find this engine: `host:port`."""

    def publish(self, cards: Sequence[bytes]) -> None:
        """Makes known what the engine's ranks hold: the card of each worker. Other cards than
        before begin a new life, in which all leases end."""

    def grant(
        self,
        request: str,
        *,
        tokens: int,
        blocks: Sequence[_Numbers],
        first: _Numbers | None = None,
        origin: bytes | None = None,
    ) -> dict[str, Any]:
        """Promises to keep a request's blocks, and gives the ticket to read them.

        `blocks` has the table of every group, `first` the position of its first block where it was
        clipped: what a peer passes to `Worker.load` as `source_blocks` and `source_first`. What a peer
        has read by anything else it is told not to use. `origin` stands in 16 bytes for what the blocks were
        computed from: a peer that passes another one to `Worker.load`, or none, is told the same.

        Where the request was opened, the ticket is the same as then, with an `epoch` that nobody could have
        guessed before, and tokens and tables must go on from those that it has advanced to. Raises
        `AgentError` of the kind `given_up` if who reads it gave it up meanwhile: the blocks are free.
        """

    def check(
        self,
        ticket: dict[str, Any],
        *,
        tokens: int,
        blocks: Sequence[_Numbers],
        first: _Numbers | None = None,
    ) -> None:
        """Checks that a ticket, and the tokens and tables that came with it through a router and a client, are what the
        engine that it names has said. To be called before anything else is done with the ticket. Raises `AgentError`
        of the kind `forged` or `unsealed`. Passes everything where the engines share no key.
        """

    @property
    def engine_seal(self) -> str | None:
        """This engine's word that it listens at its address, for routers that pass nothing else on; None where
        the engines share no key."""

    def check_engine(self, engine: str, address: str, seal: str | None = None) -> None:
        """Like `check`, for another engine's `engine_seal`."""

    def foreign(self, address: str) -> list[str]:
        """The addresses of `host:port` at which an engine may be looked for that runs no agent, and so proves
        nothing: those of `peers`; without any, of loopback, or with `insecure` all. A name is looked up. Raises
        `AgentError` where there are none."""

    def open(self, request: str, *, name: str | None = None) -> dict[str, Any]:
        """Lets peers follow a request while it is computed, and gives the ticket to do so. Those who have
        no ticket find it by its name; of several requests with one name the latest.

        It must be granted in the end, or revoked. Until it is granted its blocks are the engine's own,
        and nothing is reported when nobody wants it any more."""

    def advance(
        self,
        request: str,
        *,
        tokens: int,
        blocks: Sequence[_Numbers],
        first: _Numbers | None = None,
        in_flight: Sequence[tuple[int, int]] = ...,
    ) -> None:
        """More of an open request is complete: all its tokens and tables so far, which only grow until
        the request is granted or starts over. Tables of windows and states may change meanwhile: they
        count only at the end, and may be left empty until then.

        `in_flight` are the request's steps that are being computed, in their order: the number of each, and
        the tokens that the request has after it. The tables name their blocks, too. What workers say of
        them (`Worker.wrote`) can be read at once; if one comes to nothing, the request must start over.

        Raises `AgentError`, of the kind `given_up` if nobody wants the request any more, `changed` if the
        tables do not go on from those before, `steps_do_not_rise` if the steps do not, `no_lease` if the
        request is not open, or `table_too_long`."""

    def enclose(self, request: str, enclosed: bytes) -> None:
        """What an open request's followers are given with its blocks, as soon as it is granted: at most 16 KiB that
        mean something to the two engines, such as the first token. They come as `Ending.enclosed`; those who load by
        `source_blocks` do not get them. Raises `AgentError`, of the kind `too_much_enclosed`, `no_lease` or `given_up`."""

    def restart(self, request: str) -> None:
        """An open request starts over: nothing that it has advanced to holds any more. To be called
        before its blocks can change. Raises `AgentError`, as `advance` does."""

    def revoke(self, request: str) -> bool:
        """Takes a promise back. Answers whether there was one."""

    def released(self, timeout: float = 0.0) -> list[tuple[str, str]]:
        """The requests whose blocks are the engine's again since the last call, and why:
        `confirmed`, `abandoned`, `expired` or `revoked`. Waits for the first of them."""

    def hold(self, ticket: dict[str, Any], *, patience: float) -> None:
        """Keeps another engine's lease alive until it is settled or abandoned."""

    def follow(
        self,
        request: str,
        *,
        ticket: dict[str, Any] | None = None,
        engine: str | None = None,
        address: str | None = None,
        name: str | None = None,
        patience: float,
    ) -> None:
        """Follows a request that another engine computes for this one, by its ticket or by the name that
        the engine at that address has given to it, or will. `request` is this engine's name for it.

        From when there is a lease it is also held, as by `hold`. The request is lost when there is
        nothing new for `patience` seconds. `settle`, `abandon` and `unfollow` end it."""

    def frontier(self, request: str) -> dict[str, Any] | None:
        """How far a request is that is followed: `ticket`, `epoch`, `tokens`, `begun` (it is computed; some
        engines say so only with the first tokens), `sealed` (all of it is complete) and `speed` (in tokens per second, None until it is known). None while the engine that
        computes it has not been heard from, and when it is lost."""

    def unfollow(self, request: str) -> None:
        """A request that is followed is not wanted any more, whether or not its ticket is known: tells the
        engine that computes it."""

    def leave(self, request: str) -> None:
        """Stops to follow a request because another request of this engine has its lease, which stays held
        for that one."""

    def reading(self, ticket: dict[str, Any]) -> None:
        """The ranks read it: `status` tells it from those that wait."""

    def settle(self, ticket: dict[str, Any]) -> None:
        """All ranks have read and confirmed it."""

    def abandon(self, ticket: dict[str, Any]) -> None:
        """It is not wanted any more: tells the engine that holds the blocks, unless nobody has ever answered at its
        address, or it is not held and there was no reason yet to connect there."""

    def lost(self) -> list[tuple[dict[str, Any], str]]:
        """The tickets whose blocks elsewhere are gone since the last call, and why. Those of requests that
        were followed say so under the key `follows`; it is the only key where the other engine never heard
        of the request, but for `draining` where that engine is about to go and will not."""

    def drain(self) -> bool:
        """The engine is about to go: `grant` and `open` raise `AgentError` of the kind `draining` from now on,
        and what was promised before is kept. Whether that is news."""

    def resume(self) -> bool:
        """The engine stays: takes `drain` back. Whether that is news."""

    def drain_on(self, signal: int) -> None:
        """Drains when the process gets this signal."""

    def left(self) -> tuple[int, int]:
        """What an engine that drains must still wait for: requests that it keeps or computes for others, and
        requests that others keep for it."""

    def watch(self) -> None:
        """Notes what readers do with this engine's leases, from now on, for `notes`."""

    def notes(self) -> list[tuple[str, str, str, float]]:
        """What readers did since the last call, if that is watched: the request, what (`followed`, or
        `read`: and was told that the lease was held), who, and when, in seconds since 1970."""

    def status(self) -> dict[str, Any]: ...
    def metrics(self) -> str:
        """Counters and histograms as Prometheus text."""

    def counts(self) -> dict[str, int]:
        """The counters among the metrics, by name: `leases_granted`, `leases_confirmed`,
        `leases_expired`, `refusals`, `holds_lost` and so on."""

    def close(self) -> None:
        """Ends its thread and connections. A thread that waits in `released` returns at once. Every
        other method raises `AgentError` from then on."""

@final
class Ending:
    """How a request's load ended on one rank."""

    @property
    def request(self) -> str: ...
    @property
    def outcome(self) -> str:
        """`done`, `failed`, `aborted`, `expired`, or `settled`: nothing will land any more in the
        blocks of a request that ended in quarantine."""

    @property
    def kind(self) -> str:
        """What kind of failure, for those that failed: `deadline`, `peer_gone`, `peer_misbehaved`, `refused`,
        `restarted`, `bad_request`, `transport`, `mismatch` or `internal`."""

    @property
    def reason(self) -> str:
        """Why, for those that are not done."""

    @property
    def quarantined(self) -> bool:
        """Whether bytes may still land in its blocks, which must not be put to another use before
        its `settled` comes."""

    @property
    def bytes(self) -> int: ...
    @property
    def copies(self) -> int: ...
    @property
    def seconds(self) -> dict[str, float]:
        """Where the time went, by phase."""

    @property
    def moments(self) -> dict[str, float]:
        """When, in seconds since 1970, the load `began`, had the other engine `known`, was `admitted`,
        `reads` for the first time, had all bytes `arrived`, was `audited` and `confirmed`, and `ended`:
        those that came so far."""

    @property
    def lowerings(self) -> list[str]:
        """How it was read: `direct`, `packed`, `loops`."""

    @property
    def read_by(self) -> list[tuple[int, str, str]]:
        """For each rank of the other engine that bytes come from: its number, the transport that moves them, and,
        with `gpu`, why a better one does not; empty where that is the best."""

    @property
    def rest(self) -> _Words:
        """What is left of the request's own blocks, as from `Plan.rest`."""

    @property
    def enclosed(self) -> builtins.bytes:
        """What the source has enclosed (`Scheduler.enclose`), where it was asked for the tables. As good as the blocks."""

@final
class Worker:
    """The half of an agent that lives with the memory of one rank."""

    def __new__(
        cls,
        manifest: Manifest,
        *,
        ranks: int,
        memory: object,
        transport: str = "local",
        bind: str = "127.0.0.1:0",
        advertise: str | None = None,
        key: str | None = None,
        key_file: _Path | None = None,
        tls: tuple[_Path, _Path, _Path] | None = None,
        insecure: bool = False,
        peers: Sequence[str] = ...,
        handshake: float = 10.0,
        concurrent: int = 64,
        least_ahead: float = 0.002,
        lowering: str = "auto",
        audit: float = 0.01,
        gpu_sms: int | None = None,
        gpu_kernel: _Path | None = None,
        gpu_staging: int | None = None,
        ports: tuple[int, int] | None = None,
        encrypt: bool = True,
    ) -> Worker:
        """Registers the manifest's regions with a transport and starts: `local`, `tcp`, `cuda` (GPU
        memory inside a node), `nixl`, or `gpu`: the first of `cuda`, `nixl` (with RDMA) and `tcp` that works, for each peer.

        `memory` is whatever keeps the regions alive: peers read them, and requests write them, until
        `close`. `ranks` is the number of ranks of the engine. `bind` and `advertise` are for `tcp`, for what
        packs for peers, and for tasks that the engine's own scheduler hands to this rank; `ports` are the first and the last
        port that these take one of. What takes less than
        `least_ahead` seconds is not read ahead of the end of a source's computation. `lowering` says how
        peers are read: `auto` (whatever is cheapest), or always `direct` or `packed`. `audit` is
        the fraction of requests that are compared with what the source holds before they are used: 0 is none,
        1 is all; unless it is 0, the first ones of every pair of engines are. Kernels on a GPU take `gpu_sms` of its
        multiprocessors at most, and are those of the file `gpu_kernel` instead of compiled here. `gpu_staging` MiB of its memory
        at most are taken to pack short runs into with `nixl` (512 without; 0 is none, and such runs are read one by one), and to
        move it through with `tcp` (128 without). Trust (`key`, `key_file`, `tls`, `insecure`, `peers`) is that of the engine's `Scheduler`.
        With a key or `tls`, what `tcp` moves between hosts is encrypted where either of the two wants to `encrypt`.
        """

    def card(self) -> bytes:
        """What this rank makes known to other engines, through its scheduler."""

    def load(
        self,
        request: str,
        ticket: dict[str, Any],
        *,
        deadline: float = 60.0,
        patience: float = 60.0,
        rest: bool = True,
        granted: int | None = None,
        origin: bytes | None = None,
        tokens: int,
        source_blocks: Sequence[_Numbers] | None = None,
        destination_blocks: Sequence[_Numbers],
        cached: _Numbers | None = None,
        source_first: _Numbers | None = None,
        destination_first: _Numbers | None = None,
    ) -> None:
        """Starts to load a request; the tables are those of `Plan`. How it ends is in `endings`, at the
        latest `deadline` seconds from now.

        The source's tables must be those that it granted, whoever carried them here: otherwise the load
        ends as `expired`. `granted` is how many tokens it granted, where this engine reads fewer. So must
        `origin` be: 16 bytes for what this engine's request is computed from, as in `Scheduler.grant`.

        Without `source_blocks` the source is asked for them. It may still be computing the request: what
        is complete is read meanwhile, and the rest when all of it is. Then `deadline` counts from when
        the source last had something new to give, and `patience` bounds the wait for that.

        With `rest`, `Ending.rest` says what no byte was read into, of the blocks that the request has to itself.
        """

    def begin_step(self, step: int) -> None:
        """The engine begins a step that its scheduler has spoken of (`Scheduler.advance`): all steps before it
        are over, and what they write is written."""

    def is_heard(self, step: int) -> bool:
        """Whether anybody wants to hear what a step writes. Where nobody does, it can be told later, with what is
        written until then."""

    def wrote(self, step: int, states: Sequence[str]) -> None:
        """The present step has written all that it writes of these states: others may read that now."""

    def end_step(self, step: int) -> None:
        """The present step has written everything."""

    def abort(self, request: str) -> None:
        """The request is not wanted any more. Its end is reported as any other."""

    def endings(self, timeout: float = 0.0) -> list[Ending]:
        """The loads that have ended since the last call. Waits for the first of them."""

    def zero(self, ending: Ending) -> None:
        """Zeroes what is left of a request's own blocks, in host memory."""

    def metrics(self) -> str:
        """Counters and histograms as Prometheus text."""

    def counts(self) -> dict[str, int]:
        """Some of the counters among the metrics, by name: what endings do not tell, `read_packed_bytes`,
        `audits_matched`, `packed_refused` and so on."""

    def close(self) -> None:
        """Cancels what is under way, ends its threads and releases the memory, which is the last to
        go. A thread that waits in `endings` returns at once. Every other method raises `AgentError`
        from then on."""

def introduce(
    worker: Worker,
    address: str,
    incarnation: str,
    ranks: Sequence[tuple[Manifest, bytes, bytes]],
) -> None:
    """Makes an engine known to a worker that runs no agent but has registered its memory with NIXL. Loads with
    tickets of this `address` and `incarnation` (16 hexadecimal digits) are read from it, and used without a
    confirmation.

    Each rank is its manifest, its NIXL metadata, and a name of 16 bytes that no other process has, nor a later life
    of the same one.
    """

@final
class Bell:
    """Sends NIXL notifications to processes that may know nothing of kvferry."""

    def __new__(cls) -> Bell:
        """Makes a NIXL agent without any memory."""

    def meet(self, metadata: bytes) -> str:
        """Learns how to reach a process from its NIXL metadata. Returns NIXL's name for it."""

    def ring(self, name: str, message: bytes) -> None:
        """Sends a message to a process that was met. Whether it arrives is not known."""

    def forget(self, name: str) -> None:
        """Forgets a process."""
