"""What comes through a router does not decide what is read: an error or the right tokens, never others."""

import copy
import random
import time

import pytest
from exact import without_hints, prompts

from .common import HANDSHAKE, USUAL, eventually, expect, meets, more
from .inside import begin, give_up, leases, pump, side, turn

#: The engines of `test_failures`, which are there already.
CASES = pytest.mark.parametrize(
    "kind, policy",
    [
        ("qwen3", "fail"),
        more("qwen3", "recompute"),
        more("nemotron_h", "fail"),
        ("nemotron_h", "recompute"),
    ],
)
LENGTH = 150


class Case:
    """A pair, a prompt of ours and one of somebody else, and what is right for each."""

    def __init__(self, pair, kind, policy):
        self.prefill, self.decode = pair(kind, d={"failure": policy, "extra": HANDSHAKE})
        self.policy, self.tickets = policy, []
        self.prompt, self.others = prompts(random.Random(f"forged {kind}"), [LENGTH, LENGTH])
        self.alone, _ = self.decode.generate(self.prompt)
        self.theirs, _ = self.decode.generate(self.others)
        assert self.alone != self.theirs
        eventually(meets, self.prefill, self.decode, self.prompt)
        assert self.decode.idle() == self.prefill.idle() == 0

    def fails(self, params):
        expect(self.decode, self.policy, self.prompt, params, self.alone)

    def granted(self, prompt=None):
        (params,) = self.prefill.prefill([prompt or self.prompt])
        self.tickets.append(copy.deepcopy(params))
        return params

    def ends(self):
        """Nobody holds anything, once P knows that nobody comes for what is left."""
        for params in self.tickets:
            self.prefill.call(give_up, params)
        assert self.decode.idle() == self.prefill.idle() == 0

    def not_granted(self):
        return self.prefill.call(counts)["confirmations_not_granted"]


def counts(engine):
    return side(engine).agent.counts()


def changed(params, tables=None, **ours):
    """Parameters as a client might send them, with the ticket that P gave."""
    params = copy.deepcopy(without_hints(params))
    params["kvferry"] |= ours
    return params | ({} if tables is None else {"remote_block_ids": tables})


@CASES
def test_other_blocks_than_were_granted(pair, kind, policy):
    case = Case(pair, kind, policy)
    right = case.granted()
    tables = right["remote_block_ids"]
    shape = [len(table) for table in tables]
    assert case.decode.generate(case.prompt, params=right)[0] == case.alone
    assert case.decode.idle() == case.prefill.idle() == 0

    # Another request's blocks: whoever reads them answers from somebody else's prompt.
    victim = case.granted(case.others)
    before = case.not_granted()
    right = case.granted()
    stolen = victim["remote_block_ids"]
    assert [len(table) for table in stolen] == shape and stolen != right["remote_block_ids"]
    case.fails(changed(right, stolen))
    assert case.not_granted() == before + 1
    # Only those of one group.
    right = case.granted()
    case.fails(changed(right, [stolen[0], *right["remote_block_ids"][1:]]))
    # The victim has lost nothing by it.
    assert case.decode.generate(case.others, params=victim)[0] == case.theirs
    # Blocks of nobody.
    right = case.granted()
    used = {block for table in right["remote_block_ids"] for block in table}
    nobody = iter(block for block in range(63, 0, -1) if block not in used)
    case.fails(changed(right, [[next(nobody) for _ in table] for table in right["remote_block_ids"]]))
    assert case.not_granted() == before + 3
    # Another order.
    right = case.granted()
    tables = right["remote_block_ids"]
    turned = [table[::-1] for table in tables]
    if turned == tables:
        turned = tables[::-1]
    assert turned != tables
    case.fails(changed(right, turned))
    # One more, which nothing would be read from.
    right = case.granted()
    case.fails(changed(right, [[*table, 1] for table in right["remote_block_ids"]]))
    # Another place.
    right = case.granted()
    case.fails(changed(right, first=[first + 1 for first in right["kvferry"]["first"]]))
    case.ends()


@CASES
def test_the_ticket_of_another_request(pair, kind, policy):
    """With all that belongs to it, and in the very same blocks: nothing is forged but whom it is for."""
    case = Case(pair, kind, policy)
    refused = case.not_granted()
    tables = []
    for prompt, alone in ((case.others, case.theirs), (case.prompt, case.alone)):
        case.prefill.call(use_blocks_in_order)
        (params,) = case.prefill.prefill([prompt])
        tables.append((params["remote_block_ids"], params["kvferry"]["tokens"]))
        if prompt is case.others:
            case.fails(without_hints(params))
            assert case.not_granted() == refused + 1
        else:
            assert case.decode.generate(prompt, params=params)[0] == alone
        assert case.prefill.idle() == 0
    assert tables[0] == tables[1], "the prompt alone tells them apart"
    # Of one's own prompt, but with another salt: another cache.
    case.decode.call(begin_salted, case.prompt, without_hints(case.granted()))
    ((made, _, how),) = case.decode.call(pump).values()
    assert (how == "error") if policy == "fail" else (made == case.alone)
    assert case.not_granted() == refused + 2
    assert case.decode.idle() == case.prefill.idle() == 0


def begin_salted(engine, prompt, params):
    begin(engine, "salted", prompt, 12, params, salt="another")


def use_blocks_in_order(engine):
    """The next request gets the blocks that the first one of an engine gets."""
    pool = engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    free = sorted(pool.free_block_queue.get_all_free_blocks(), key=lambda block: block.block_id)
    for block in free:
        pool.free_block_queue.remove(block)
    for block in free:
        pool.free_block_queue.append(block)


@CASES
def test_other_tokens_than_were_computed(pair, kind, policy):
    case = Case(pair, kind, policy)
    computed = case.granted()["kvferry"]["tokens"]
    for tokens in (computed - 1, computed - 32, 1):
        case.fails(changed(case.granted(), tokens=tokens))
    for tokens in (computed + 1, computed + 32, 2**63):
        params = changed(case.granted(), tokens=tokens)
        if kind == "nemotron_h":
            # A state of another position is of no use: nothing is even tried.
            assert case.decode.generate(case.prompt, params=params)[0] == case.alone
        else:
            case.fails(params)
    case.ends()


@CASES
def test_tables_that_cannot_be(pair, kind, policy):
    case = Case(pair, kind, policy)
    for tables in (
        lambda given: [[10**6 for _ in table] for table in given],
        # Longer than the pool, with blocks that exist and with one that is there again and again.
        lambda given: [list(range(1, 64)) * 20 for _ in given],
        lambda given: [table * 1000 for table in given],
        lambda given: [*given, given[0]],
        lambda given: given[:-1],
        lambda given: [table[:-1] for table in given],
    ):
        right = case.granted()
        case.fails(changed(right, tables(right["remote_block_ids"])))
    case.ends()


@CASES
def test_a_lease_that_is_over_or_never_was(pair, kind, policy):
    case = Case(pair, kind, policy)
    right = case.granted()
    # An unknown request.
    case.fails(changed(right, ticket=right["kvferry"]["ticket"] | {"request": "no such"}))
    # Used, and used again at once: it is remembered here.
    assert case.decode.generate(case.prompt, params=right)[0] == case.alone
    assert case.decode.generate(case.prompt, params=right)[0] == case.alone
    # Over, and then over with another prompt in its blocks.
    for overwritten in (False, True):
        right = case.granted()
        case.ends()
        if overwritten:
            now = [case.granted(case.others) for _ in range(3)]
            blocks = {b for params in now for table in params["remote_block_ids"] for b in table}
            assert all(set(table) & blocks for table in right["remote_block_ids"])
        case.fails(right)
    case.ends()


@CASES
def test_other_engines(engines, pair, kind, policy):
    case = Case(pair, kind, policy)
    other = engines(kind, "kv_both", **USUAL[kind] | {"failure": policy, "extra": HANDSHAKE})
    eventually(meets, case.prefill, other, case.prompt)
    # A ticket of another engine: with its own address, and with the one that it is not for.
    right = case.granted()
    (foreign,) = other.prefill([case.others])
    tickets = [params["kvferry"]["ticket"] for params in (right, foreign)]
    case.fails(changed(right, ticket=tickets[1]))
    case.fails(changed(right, ticket=tickets[0] | {"address": tickets[1]["address"]}))
    assert case.decode.generate(case.prompt, params=right)[0] == case.alone
    # One ticket at two engines at once: one of them has it.
    for _ in range(3):
        right = case.granted()
        readers, ends = [case.decode, other], []
        for reader in readers:
            reader.call(begin, "r", case.prompt, 12, copy.deepcopy(right))
        until = time.monotonic() + 60
        while readers:
            assert time.monotonic() < until, "too late"
            for reader in list(readers):
                for end in reader.call(turn).values():
                    ends.append(end)
                    readers.remove(reader)
        for tokens, _, how in ends:
            assert tokens == case.alone or (policy == "fail" and how == "error")
        assert any(tokens == case.alone for tokens, _, _ in ends)
    # One of them reads by other tables: it has nothing.
    victim, right = case.granted(case.others), case.granted()
    before = case.not_granted()
    other.call(begin, "r", case.prompt, 12, changed(right, victim["remote_block_ids"]))
    ((tokens, _, how),) = other.call(pump).values()
    assert (how == "error") if policy == "fail" else (tokens == case.alone)
    assert case.not_granted() == before + 1
    assert case.decode.generate(case.others, params=victim)[0] == case.theirs
    case.ends()
    other.call(give_up, foreign)
    assert other.idle() == 0
    assert other.call(leases) == []
