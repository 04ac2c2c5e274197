"""When D takes blocks: not before it needs them, and not when others need them more."""

import pytest
from kvferry.vllm.scheduler.pace import AHEAD, MARGIN, Pace


def frontier(tokens, speed=None, sealed=False, begun=None):
    begun = tokens > 0 if begun is None else begun
    how_far = {"epoch": 0, "tokens": tokens, "begun": begun, "speed": speed, "sealed": sealed}
    return {"ticket": {"engine": "p"}} | how_far


@pytest.mark.parametrize("free", [0.0, 0.2, 1.0])
def test_what_p_has_finished_is_taken(free):
    assert Pace().is_time(frontier(1000, sealed=True), 0.0, 1000, free)


def test_blocks_are_taken_for_as_long_as_the_transfer_takes():
    pace = Pace()
    # 10,000 tokens a second: a transfer of 20,000 takes two seconds.
    pace.learn(None, 10_000, 1.0)
    # P makes 1,000 a second: what is left may take two seconds, and a little more.
    left = int(1000 * (2 * MARGIN + AHEAD))
    assert not pace.is_time(frontier(20_000 - left - 10, speed=1000.0), 0.0, 20_000, 1.0)
    assert pace.is_time(frontier(20_000 - left + 10, speed=1000.0), 0.0, 20_000, 1.0)
    # P tells of a step when it is over: a large one is not waited for.
    step = frontier(20_000 - left - 1000, speed=1000.0)
    assert not pace.is_time(step, 0.9, 20_000, 1.0)
    assert pace.is_time(step, 1.1, 20_000, 1.0)


def test_under_pressure_they_are_taken_later():
    pace = Pace()
    pace.learn(frontier(1000, speed=1000.0, sealed=True), 1000, 0.01)
    near = frontier(999, speed=1000.0)
    assert pace.is_time(near, 0.0, 1000, 0.3)
    assert not pace.is_time(near, 0.0, 1000, 0.1)
    # What P has not begun may take for ever; with blocks to spare, what is short is taken at once.
    assert not pace.is_time(frontier(0), 0.0, 50, 0.3)
    assert pace.is_time(frontier(0), 0.0, 50, 0.9)
    assert not pace.is_time(frontier(0), 0.0, 5000, 0.9)
    # What is slower now is soon believed.
    for _ in range(2):
        pace.learn(frontier(1000, speed=100.0, sealed=True), 1000, 0.01)
    assert not pace.is_time(frontier(0), 0.0, 50, 0.9)


def test_a_step_that_p_computes_counts_before_it_is_over():
    """Its layers can be read already, and there may be no other step."""
    pace = Pace()
    pace.learn(frontier(1000, speed=1000.0, sealed=True), 1000, 0.1)
    for begun in (False, True):
        assert not pace.is_time(frontier(0, begun=begun), 0.0, 2000, 0.9)
        assert pace.is_time(frontier(0, begun=begun), 1.9, 2000, 0.9) == begun


def test_a_slower_transfer_counts_at_once_and_a_faster_one_by_and_by():
    pace = Pace()
    for seconds in (0.1, 2.0, 0.1):
        pace.learn(None, 1000, seconds)
    # Nearly two seconds are still expected.
    assert pace.is_time(frontier(0, speed=1000.0, begun=True), 0.0, 1500, 0.9)
    for _ in range(20):
        pace.learn(None, 1000, 0.1)
    assert not pace.is_time(frontier(0, speed=1000.0, begun=True), 0.0, 1500, 0.9)


def test_long_prompts_say_little_about_short_ones():
    pace = Pace()
    # 5,000 tokens a second for what is short, 500 for what is long; a transfer makes 10,000.
    pace.learn(frontier(1000, speed=5000.0, sealed=True), 1000, 0.1)
    for _ in range(5):
        pace.learn(frontier(16_000, speed=500.0, sealed=True), 16_000, 1.6)
    begun = {"age": 0.05, "free": 0.9}
    assert pace.is_time(frontier(0, begun=True), tokens=1000, **begun)
    assert not pace.is_time(frontier(0, begun=True), tokens=16_000, **begun)
    # Of neither length: as if it were quick.
    assert pace.is_time(frontier(0, begun=True), tokens=300, **begun)


def test_the_first_request_teaches():
    assert Pace().is_time(frontier(0), 0.0, 5000, 0.9)
    assert not Pace().is_time(frontier(0), 0.0, 5000, 0.4)
    assert Pace().is_time(frontier(10), 0.0, 5000, 0.4)
