"""What the compiled part says reaches Python's `logging`."""

import logging
import subprocess
import sys
import time

import kvferry
import pytest
from handmade import grant, load
from kvferry.vllm import logs


def wait_for(lines, text):
    until = time.monotonic() + 30
    while not any(text in line for _, line in lines()):
        assert time.monotonic() < until, f"{text!r} is not in {lines()}"
        time.sleep(0.01)


@pytest.fixture
def lines(caplog):
    """What is logged, at any level; the connector's own handlers are taken away afterwards."""
    logs.logger.addHandler(caplog.handler)
    # Records can come by two ways, over this logger and over its parents.
    yield lambda: list(dict.fromkeys((one.levelname, one.getMessage()) for one in caplog.records))
    logs.logger.handlers.clear()
    logs.logger.propagate = True
    logs.start("off")


def test_a_load_that_fails_says_why_and_for_whom(engines, lines):
    logs.start("info")
    prefill, decode = engines("prefill", 1, 4), engines("decode", 1, 4)
    facts = dict(tokens=6, source_blocks=[[7, 99]], destination_blocks=[[3, 4]])
    ticket = grant(prefill, "request-1", **facts)
    (ending,) = load(decode, "request-9", ticket, **facts)
    assert (ending.outcome, ending.kind) == ("failed", "bad_request")
    wait_for(lines, "request=request-9")
    (line,) = [line for line in lines() if "request=request-9" in line[1] and line[0] == "WARNING"]
    assert line[1].startswith("kvferry: the load failed failure=") and "from=prefill" in line[1]
    assert "99" in line[1]
    assert not [line for line in lines() if line[0] == "DEBUG"]


@pytest.mark.parametrize("level", ["warning", "debug"])
def test_a_line_names_its_request_on_both_sides_whatever_is_logged(engines, lines, level):
    logs.start(level)
    prefill, decode = engines("prefill", 1, 4), engines("decode", 1, 4)
    facts = dict(tokens=6, source_blocks=[[7, 2]], destination_blocks=[[3, 4]])
    ticket = grant(prefill, "request-1", **facts)
    (ending,) = load(decode, "request-9", ticket, **facts | dict(source_blocks=[[2, 7]]))
    assert ending.outcome == "expired"
    wait_for(lines, "what was read is not used")
    (line,) = [line for _, line in lines() if "what was read is not used" in line]
    assert line.endswith(" request=request-9 from=prefill theirs=request-1")


def test_debug_says_where_the_time_went_and_off_says_nothing(engines, lines):
    logs.start("debug")
    prefill, decode = engines("prefill", 1, 4), engines("decode", 1, 4)
    facts = dict(tokens=4, source_blocks=[[7]], destination_blocks=[[3]])
    load(decode, "request-9", grant(prefill, "request-1", **facts), **facts)
    wait_for(lines, "wire=")
    logs.start("off")
    before = len(lines())
    load(decode, "request-10", grant(prefill, "request-2", **facts), **facts)
    kvferry.log_to(logging.getLogger("vllm.kvferry"), "off")
    assert not [line for line in lines()[before:] if "request-10" in line[1]]


FORK = """
import logging, os, sys, time
import kvferry

said = []
class Handler(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())

logger = logging.getLogger("forked")
logger.setLevel(logging.DEBUG)
logger.addHandler(Handler())
kvferry.log_to(logger, "info")
# The thread that listens waits now, and is not there in the child.
time.sleep(0.5)
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
kvferry.log_to(logger, "info")
time.sleep(0.5)
scheduler = kvferry.Scheduler("in the child")
until = time.monotonic() + 20
while not said and time.monotonic() < until:
    time.sleep(0.01)
os._exit(0 if said else 3)
"""


def test_a_forked_process_hears_its_own_lines_at_once():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60)


def test_a_level_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="'loud' is not a level to log at: the levels are off, error"):
        kvferry.log_to(logging.getLogger("x"), "loud")


def test_debug_is_logged_though_vllm_itself_logs_less(lines):
    vllm, theirs = logging.getLogger("vllm"), logging.StreamHandler()
    theirs.setLevel(logging.INFO)
    vllm.addHandler(theirs)
    try:
        logs.start("debug")
    finally:
        vllm.removeHandler(theirs)
    ours = [handler for handler in logs.logger.handlers if handler.__class__ is theirs.__class__]
    assert [handler.level for handler in ours] == [logging.DEBUG] and not logs.logger.propagate
