"""What P says of a request that grows, and what cannot be: D uses nothing of it."""

import random

import pytest
from exact import prompts
from heard import forget_lines, listen, said

from .between import (
    end_of_less,
    end_of_more,
    epoch_before,
    far_out_of_range,
    fewer_blocks,
    fewer_tokens,
    longer_than_the_pool,
    more_than_anything_holds,
    more_than_the_tables_hold,
    other_blocks,
    out_of_range,
    stand_aside,
    stand_between,
    tell,
)
from .common import eventually, more
from .inside import blank, filled, pump, side, steps, where
from .pushed import CHUNKS, BOUNDED, answers, begin_to_read, epochs, followed, knows, preempt, start

#: What D's log says of a P that says what it cannot mean, and of one that says what cannot be.
CONTRADICTS = "the load failed failure=the engine to read from is not to be believed: the engine"
NOT_THERE = "the load failed failure=the request does not fit: source group 0:"


def test_an_engine_that_contradicts_itself(pair):
    """P's own agent does not pass on what cannot be: D reads by what was right."""
    prefill, decode = pair("qwen3", None, CHUNKS)
    (prompt,) = prompts(random.Random(35), [300])
    alone = prefill.generate(prompt)[0]
    (name,) = start(prefill, decode, [prompt])
    prefill.call(steps, 3)
    decode.call(steps, 3)
    # Fewer tokens, other blocks, and more blocks than there are.
    assert prefill.call(contradict) == ["changed", "changed", "table_too_long"]
    ((made, _),) = answers(prefill, decode, [name])
    assert made == alone


def contradict(engine):
    import kvferry

    prefill, agent = side(engine).prefill, side(engine).agent
    ((name, growing),) = prefill.growing.items()
    (table,) = prefill.groups.grown(prefill.manager, name, growing.tokens)
    kinds = []
    for tokens, blocks in (
        (growing.tokens - 32, [table[:-1]]),
        (growing.tokens, [table[::-1]]),
        (growing.tokens, [table + list(range(1, 64)) * 20]),
    ):
        try:
            agent.advance(name, tokens=tokens, blocks=blocks)
            kinds.append("passed on")
        except kvferry.AgentError as error:
            kinds.append(error.kind)
    return kinds


@pytest.mark.parametrize("policy", [more("fail"), "recompute"])
def test_an_agent_that_passes_contradictions_on(pair, policy):
    """What D has heard does not shrink, does not change, and does not go back to an epoch that is over. What it hears
    then must be there. From whoever says otherwise nothing is read any more, and nothing that was read is used."""
    prefill, decode = pair("qwen3", None, CHUNKS, BOUNDED | {"failure": policy})
    prompt, other = prompts(random.Random(42), [300, 64])
    alone = decode.generate(prompt)[0]
    decode.call(listen)
    there = prefill.call(where) | {"remote_port": prefill.call(stand_between)}
    eventually(knows, prefill, decode, prompt, there)
    for change, why in (
        (fewer_tokens, f"{CONTRADICTS} had granted 128 tokens in epoch {{0}}, and now grants 64 "),
        (fewer_blocks, f"{CONTRADICTS} had granted 128 tokens in epoch {{0}}, and now grants 129 "),
        (other_blocks, f"{CONTRADICTS} had granted 128 tokens in epoch {{0}}, and now grants 129 "),
        (end_of_less, f"{CONTRADICTS} had granted 128 tokens in epoch {{0}}, and now grants 64 "),
        (epoch_before, f"{CONTRADICTS} speaks of epoch {{1}} after epoch {{0}}"),
        # P is asked whether they were its tables.
        (longer_than_the_pool, "what was read is not used loss=the block tables that were read are not those"),
        (out_of_range, f"{NOT_THERE} the table names block 1000000 at position 6, but there are only 64"),
        (far_out_of_range, f"{NOT_THERE} the table names block 4294967295 at position 6, but there are only 64"),
        (more_than_the_tables_hold, f"{NOT_THERE} position 6 is needed, but the table has 6 entries"),
        (more_than_anything_holds, f"{NOT_THERE} position 6 is needed, but the table has 6 entries"),
        (end_of_more, f"{NOT_THERE} position 6 is needed, but the table has 6 entries"),
    ):
        begin_to_read(prefill, decode, prompt, there=there)
        (before,) = decode.call(epochs)
        # Twice, because P starts over: three chunks, of which D knows that two are complete, and reads all.
        for again in (False, True):
            if again:
                prefill.call(preempt, other)
            decode.call(blank)
            eventually(lambda: prefill.call(steps, 1) or prefill.call(followed) == [128])
            eventually(lambda: decode.call(filled) == 6)
        decode.call(forget_lines)
        # Its worker knows already that P has started over, and its scheduler hears of it by itself.
        eventually(lambda: decode.call(epochs) == [before + 1])
        why = why.format(before + 1, before)
        # P computes nothing meanwhile: D hears of it because it asks.
        prefill.call(tell, change)
        ((made, _, how),) = decode.call(pump, 90).values()
        prefill.call(tell, None)
        assert (how == "error") if policy == "fail" else (made == alone), why
        assert decode.call(said, why), why
        prefill.call(pump)
        assert prefill.idle() == decode.idle() == 0
    # It was what is said in between, and nothing else.
    names = begin_to_read(prefill, decode, prompt, there=there)
    assert answers(prefill, decode, names) == [(alone, "length")]
    assert prefill.call(stand_aside) == []
