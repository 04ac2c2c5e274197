"""What vLLM's stock NixlConnector says of itself, and how it is asked: a side channel of ZeroMQ messages.

The names and numbers here are those of its protocol, which has a version of its own and changes often.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any

import msgspec
import zmq
from msgspec import Meta

#: The versions of its protocol that are understood here: those of vLLM 0.32 and 0.33.
VERSIONS = (14, 15)
#: Seconds to wait for each answer.
PATIENCE = 5.0
#: Bytes that an answer may take.
LONGEST = 64 << 20

#: What there must be one of, and what a table can count.
_Count = Annotated[int, Meta(ge=1, le=1 << 31)]


@dataclass(frozen=True)
class Place:
    """An engine, and where it answers."""

    host: str
    port: int
    engine: str
    #: Its ranks. Nothing else says how many there are, and its listener does not survive a question about one
    #: that it does not have.
    tp: int

    @property
    def address(self) -> str:
        """As tickets have it. Never one of an agent."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"nixl://{host}:{self.port}"

    @classmethod
    def of(cls, ticket: dict[str, Any]) -> Place:
        host, _, port = ticket["address"].removeprefix("nixl://").rpartition(":")
        return cls(host.strip("[]"), int(port), ticket["engine"], ticket["tp"])


@dataclass(frozen=True)
class Rank:
    """One rank's memory, in the connector's own words: a region is one or more layers that share an address, and
    its blocks are those of the kernels."""

    engine_id: str
    agent_metadata: bytes
    kv_caches_base_addr: list[int]
    device_id: int
    num_blocks: _Count
    block_lens: list[int]
    block_strides: list[int]
    kv_cache_layout: str
    block_size: _Count
    ssm_sizes: list[int]
    attn_backend_name: str
    physical_blocks_per_logical_kv_block: _Count
    region_group_ids: list[int]
    region_names: list[str]
    region_mem_types: list[str]
    dcp_size: int
    pcp_size: int
    ple_block_len: int | None
    packed_member_layouts: dict[str, Any]


@dataclass(frozen=True)
class Introduction:
    """An engine, as its ranks describe themselves. The workers get it from their scheduler."""

    place: Place
    #: The answer of each rank.
    answers: tuple[bytes, ...]

    @property
    def incarnation(self) -> str:
        """Names this life of the engine: its ranks' NIXL agents are named at random."""
        return hashlib.blake2b(b"".join(self.answers), digest_size=8).hexdigest()

    @property
    def block(self) -> int:
        """The tokens of its blocks."""
        rank = next(self.ranks())
        return rank.block_size * rank.physical_blocks_per_logical_kv_block

    def hashes(self) -> list[str]:
        return [_payload(answer)[0] for answer in self.answers]

    def ranks(self) -> Iterator[Rank]:
        for answer in self.answers:
            yield _rank(_payload(answer)[1])


def ask(place: Place, address: str) -> Introduction:
    """Asks an engine at one of its addresses, `host:port`. Raises `OSError` where there is no answer, and `ValueError`
    for one that is not understood."""
    if not 1 <= place.tp <= 1024:
        raise ValueError(f"'tp_size' is {place.tp}, but must be from 1 to 1024")
    answers = []
    context = zmq.Context()
    try:
        socket = context.socket(zmq.REQ)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, LONGEST)
        socket.connect(f"tcp://{address}")
        for rank in range(place.tp):
            socket.send(msgspec.msgpack.encode((b"get_meta_msg", 0, rank)))
            if not socket.poll(int(PATIENCE * 1000)):
                raise TimeoutError(
                    f"rank {rank} of {place.tp} has not answered at {place.address} within {PATIENCE:.0f} s; see "
                    "whether the engine runs, and whether VLLM_NIXL_SIDE_CHANNEL_HOST there is an address that "
                    "this one reaches"
                )
            answers.append(socket.recv_multipart()[0])
    except zmq.ZMQError as error:
        raise OSError(f"cannot ask {place.address}: {error}") from error
    finally:
        context.destroy(linger=0)
    introduction = Introduction(place, tuple(answers))
    for rank, told in enumerate(introduction.ranks()):
        if told.engine_id != place.engine:
            raise ValueError(
                f"rank {rank} at {place.address} is of engine {told.engine_id}, but the request was computed "
                f"by {place.engine}: the engine has restarted"
            )
    return introduction


def _payload(answer: bytes) -> tuple[str, bytes]:
    try:
        payload = msgspec.msgpack.decode(answer)
        return str(payload["compatibility_hash"]), bytes(payload["agent_metadata_bytes"])
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"its answer is not one of vLLM's NixlConnector ({type(error).__name__}: {error})"
        ) from error


def _rank(encoded: bytes) -> Rank:
    try:
        told = msgspec.msgpack.decode(encoded)
        known = {one.name: told[one.name] for one in fields(Rank)}
        return msgspec.convert(known, Rank)
    except KeyError as error:
        raise ValueError(
            f"what it says of itself lacks {error}: it is of another version of vLLM's NixlConnector than those "
            f"that are understood ({', '.join(map(str, VERSIONS))}, of vLLM 0.32 and 0.33)"
        ) from error
    except (msgspec.DecodeError, msgspec.ValidationError, TypeError, RecursionError) as error:
        raise ValueError(f"what it says of itself is not understood: {error}") from error
