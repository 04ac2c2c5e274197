"""What a client carries from D's answer to P's next turn does not decide what is read: an error or the right tokens."""

import copy
import random
from types import SimpleNamespace

import pytest
from exact import prompts

from .common import more
from .inside import computed, count_computed, counter, side
from .test_forged import changed, counts
from .test_turns import answered, continued, keeps, let_go

#: The engines of `test_turns`, which are there already.
CASES = pytest.mark.parametrize(
    "kind, policy",
    [("qwen3", "fail"), ("qwen3", "recompute"), more("nemotron_h", "fail"), more("nemotron_h", "recompute")],
)
#: Tokens that a next turn adds.
NEW = 30


class Case:
    """A pair, a dialogue of ours and one of somebody else, both with an answer that D keeps, and what comes next."""

    def __init__(self, pair, kind, policy):
        self.prefill, self.decode = pair(kind, keeps(policy))
        self.policy, self.held_back = policy, 0 if kind == "qwen3" else 1
        self.prefill.call(count_computed)
        draw = random.Random(f"forged turns {kind}")
        self.ours, theirs, new = prompts(draw, [150, 150, NEW])
        self.said, self.params = answered(self.prefill, self.decode, self.ours)
        self.others, self.victim = answered(self.prefill, self.decode, theirs)
        self.next, self.their_next = self.said + new, self.others + new
        self.alone, _ = self.decode.generate(self.next)
        self.theirs, _ = self.decode.generate(self.their_next)
        assert self.alone != self.theirs

    def granted(self):
        """Our answer once more, with another ticket: P remembers those that came to an end."""
        self.decode.call(let_go_of, self.params)
        said, self.params = answered(self.prefill, self.decode, self.ours)
        assert said == self.said
        return copy.deepcopy(self.params)

    def fails(self, forge, fits=True):
        """P tries to read by it, and D says that it was never granted; or P finds that it cannot fit."""
        self._ends(forge(self.granted()), True, fits)

    def computes(self, forge):
        """P sees that it is not for this prompt, and computes all of it itself."""
        self._ends(forge(self.granted()), False, False)

    def _ends(self, params, fails, refused):
        before, not_granted = self.prefill.call(computed), self.not_granted()
        loads = self.prefill.call(counter, "kvferry_loads_begun_total")
        again, how = continued(self.prefill, self.next, params)
        assert self.prefill.call(counter, "kvferry_loads_begun_total") - loads == fails
        assert self.not_granted() - not_granted == refused
        if fails and self.policy == "fail":
            assert (again, how) == (None, "error")
            assert self.prefill.call(computed) == before
            return
        assert how == "length"
        assert self.prefill.call(computed) - before == len(self.next) - self.held_back
        self.hands_over(self.next, again, self.alone)

    def hands_over(self, prompt, again, alone):
        made, kept = self.decode.generate(prompt, 12, again)
        assert made == alone
        self.decode.call(let_go_of, kept)

    def not_granted(self):
        return self.decode.call(counts)["confirmations_not_granted"]

    def ends(self, used=False):
        """Both can still be continued from: nobody else has lost anything by it, unless it was their ticket that was
        used. Then nothing is left."""
        for prompt, params, alone, is_there in (
            (self.next, self.granted(), self.alone, True),
            (self.their_next, self.victim, self.theirs, not used),
        ):
            before = self.prefill.call(computed)
            again, how = continued(self.prefill, prompt, params)
            assert how == "length"
            new = NEW + 1 if is_there else len(prompt)
            assert self.prefill.call(computed) - before == new - self.held_back
            self.hands_over(prompt, again, alone)
        self.decode.call(let_go)
        assert self.prefill.idle() == self.decode.idle() == 0


def let_go_of(engine, params):
    side(engine).agent.revoke(params["kvferry"]["ticket"]["request"])


def hash_of(engine, prompt, tokens):
    """What stands for the first tokens of a prompt: a client can compute it as well as P."""
    nothing = dict(prompt_embeds=None, lora_request=None, cache_salt=None, mm_features=None)
    request = SimpleNamespace(all_token_ids=prompt, **nothing)
    return side(engine).origins.of(request, tokens).hex()


@CASES
def test_other_blocks_than_were_kept(pair, kind, policy):
    case = Case(pair, kind, policy)
    stolen = case.victim["remote_block_ids"]
    assert [len(table) for table in stolen] == [len(table) for table in case.params["remote_block_ids"]]

    def other(change):
        return lambda params: changed(params, change(params["remote_block_ids"]))

    # Another answer's blocks: whoever reads them continues somebody else's dialogue.
    case.fails(other(lambda tables: stolen))
    # Only those of one group.
    case.fails(other(lambda tables: [stolen[0], *tables[1:]]))
    # Blocks of nobody.
    case.fails(other(unused))
    # Another order.
    case.fails(other(turned))
    # One more, which nothing would be read from.
    case.fails(other(lambda tables: [*tables[:-1], [*tables[-1], 1]]))
    # Another place.
    first = [one + 1 for one in case.params["kvferry"]["first"]]
    case.fails(lambda params: changed(params, first=first), fits=False)
    case.ends()


def turned(tables):
    other = [table[::-1] for table in tables]
    return other if other != tables else tables[::-1]


def unused(tables):
    used = {block for table in tables for block in table}
    nobody = iter(block for block in range(63, 0, -1) if block not in used)
    return [[next(nobody) for _ in table] for table in tables]


@CASES
def test_other_tokens_than_were_answered(pair, kind, policy):
    """With the hash as it was P compares in vain; with one that fits its prompt it is D that does."""
    case = Case(pair, kind, policy)
    there = len(case.said) - 1
    for tokens in (there - 1, there - 32, 1, there + 1, there + 30, 2**63):
        case.computes(lambda params: changed(params, tokens=tokens))
    for tokens in (there - 1, there - 32, 1, there + 1, there + NEW - 1):
        fits = case.prefill.call(hash_of, case.next, tokens)
        case.fails(lambda params: changed(params, tokens=tokens, hash=fits))
    case.ends()


@CASES
def test_the_ticket_of_another_answer(pair, kind, policy):
    case = Case(pair, kind, policy)
    # With all that belongs to it: the prompt does not begin like that.
    case.computes(lambda params: copy.deepcopy(case.victim))
    # And with a hash that says that it does.
    case.fails(lambda params: changed(case.victim, hash=params["kvferry"]["hash"]))
    case.ends(used=True)
