"""Several answers to one prompt: all of them are made from what one read brought, and then P's lease is over."""

import random

import pytest
from environment import REMOTE_DECODE
from exact import nothing_left, prompts, unbound
from http_pair import save_tokenizer
from life.inside import abort, begin, counter, forget, leases, side, steps, turn, whats_left
from requests_inside import ask, prefilled
from serving import Server
from tiny import save_model

LENGTH = 100
#: Three answers that are not alike.
THREE = {"n": 3, "temperature": 1.0, "seed": 5}
RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


def more(*case):
    return pytest.param(*case, marks=pytest.mark.more)


@pytest.fixture(scope="module")
def engines(folder):
    running = {}

    def start(kind, **options):
        key = (kind, repr(sorted(options.items())))
        if key not in running:
            path = folder / f"{kind}-several"
            if not path.exists():
                save_tokenizer(save_model(kind, path))
            # Which way is the cheapest is measured, and some read more than is needed: here bytes are counted.
            d = {"skip_tokenizer_init": False, "extra": {"advanced": {"read_method": "direct"}}, **options}
            # Asked one after the other, as most routers do.
            p = {"skip_tokenizer_init": False, "extra": {"push": "never"}}
            running[key] = Server(path, "kv_producer", **p), Server(path, "kv_consumer", **d)
        return running[key]

    yield start
    for pair in running.values():
        for server in pair:
            server.close()


@pytest.fixture
def pair(engines):
    used = []

    def start(kind, **options):
        used.extend(engines(kind, **options))
        return used

    yield start
    nothing_left(*used)
    for server in used:
        left = server.call(whats_left)
        assert not any(left.values()), left


CASES = [
    ("nemotron_h", {}),
    # What one has read the others find in vLLM's cache of prefixes, but for the last block.
    ("qwen3", {"prefix": True, "block_size": 32}),
    more("qwen3", {"block_size": 32}),
    more("gemma3", {"block_size": 32, "prefix": True}),
    more("nemotron_h", {"async_scheduling": True}),
    more("nemotron_h", RANKS),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_one_read_is_for_all(pair, kind, options):
    prefill, decode = pair(kind, **options)
    draw = random.Random(f"one read {kind}")
    (prompt,) = prompts(draw, [LENGTH])
    alone = decode.call(ask, [{"prompt": prompt, **THREE}])[0]["answers"]
    assert len({tuple(tokens) for tokens, *_ in alone}) == 3
    if options.get("prefix"):
        assert decode.call(forget)
    # What one request reads.
    before = counted(decode)
    decode.generate(prompt, 1, prefill.prefill([prompt])[0])
    once = counted(decode) - before
    if options.get("prefix"):
        assert decode.call(forget)
    (params,) = prefill.prefill([prompt])
    before = counted(decode)
    (made,) = decode.call(ask, [{"prompt": prompt, **THREE, "params": params}])
    assert made["answers"] == alone
    if "tensor_parallel_size" not in options:
        assert counted(decode) - before == once > 0
    if options.get("prefix"):
        assert decode.call(forget)
    # P knows that all have it. And the control: each of them is made from what P has, but for the tokens after
    # the last whole block, which some compute.
    assert prefill.call(leases) == []
    other = prompts(draw, [LENGTH - 10])[0] + prompt[-10:]
    assert decode.call(ask, [{"prompt": other, **THREE}])[0]["answers"] != alone
    if options.get("prefix"):
        assert decode.call(forget)
    with unbound(prefill, decode):
        (params,) = prefill.prefill([prompt])
        sent = {"prompt": other, **THREE, "params": params}
        assert decode.call(ask, [sent])[0]["answers"] == alone
    if options.get("prefix"):
        assert decode.call(forget)


def counted(server):
    return server.call(counter, "kvferry_read_bytes_total")


def test_of_several_answers_on_p_the_blocks_of_one_are_kept(pair):
    """A router passes `n` on to P. vLLM passes on the parameters of the answer that ends last."""
    prefill, decode = pair("nemotron_h")
    (prompt,) = prompts(random.Random(1), [LENGTH])
    question = {"prompt": prompt, **THREE}
    (made,) = prefill.call(ask, [prefilled(question)])
    assert len(prefill.call(leases)) == 1
    alone = decode.call(ask, [question])[0]["answers"]
    assert decode.call(ask, [question | {"params": made["params"]}])[0]["answers"] == alone


@pytest.mark.parametrize("when", ["before they have blocks", "while one reads"])
@pytest.mark.parametrize(
    "gone",
    [
        pytest.param([0], id="who reads for all"),
        pytest.param([1], id="one that waits"),
        pytest.param([0, 2], id="two of them", marks=pytest.mark.more),
        pytest.param([0, 1, 2], id="all"),
    ],
)
def test_some_are_aborted(pair, when, gone):
    prefill, decode = pair("nemotron_h")
    (prompt,) = prompts(random.Random(2), [LENGTH])
    alone, _ = decode.generate(prompt)
    (params,) = prefill.prefill([prompt])
    names = [f"{number}_aborted" for number in range(3)]
    for name in names:
        decode.call(begin, name, prompt, 12, params)
    before = counted(decode)
    if when == "while one reads":
        decode.call(read_slowly, True)
        decode.call(until_loading, 3)
    for number in gone:
        decode.call(abort, names[number])
    decode.call(steps, 3)
    decode.call(read_slowly, False)
    stay = [name for number, name in enumerate(names) if number not in gone]
    done = {}
    while not set(stay) <= set(done):
        done |= decode.call(turn)
    assert [done[name][0] for name in stay] == [alone] * len(stay)
    assert not stay or counted(decode) > before


def read_slowly(_engine, slowly):
    """As if nothing that is read had come yet."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group().worker
    if slowly:
        worker._endings = list
    else:
        vars(worker).pop("_endings", None)


def until_loading(engine, count):
    for _ in range(1000):
        if sum(one.loading for one in side(engine).decode.wanted.values()) == count:
            return
        steps(engine, 1)
    raise AssertionError("they do not load")


@pytest.mark.more
def test_who_finds_no_blocks_computes_the_prompt(pair):
    """Blocks for two of three: the third begins when another has ended, and then P's lease is over."""
    prefill, decode = pair("nemotron_h", blocks=8, max_model_len=256)
    (prompt,) = prompts(random.Random(3), [LENGTH])
    question = {"prompt": prompt, **THREE}
    alone = decode.call(ask, [question])[0]["answers"]
    (params,) = prefill.prefill([prompt])
    assert decode.call(ask, [question | {"params": params}])[0]["answers"] == alone


def test_a_load_that_fails_fails_for_all(pair):
    prefill, decode = pair("nemotron_h")
    (prompt,) = prompts(random.Random(4), [LENGTH])
    (params,) = prefill.prefill([prompt])
    params["remote_block_ids"] = [[block + 1 for block in ids] for ids in params["remote_block_ids"]]
    (made,) = decode.call(ask, [{"prompt": prompt, **THREE, "params": params}])
    assert [reason for _, _, reason, _ in made["answers"]] == ["error"] * 3


def test_beams_are_made_from_what_d_holds(pair):
    """vLLM's beam search does not pass the parameters of a hand-over on to its beams. A request for one token
    brings P's blocks into D's cache of prefixes, and the beams find them there."""
    prefill, decode = pair("qwen3", prefix=True, block_size=32)
    (prompt,) = prompts(random.Random(6), [LENGTH])
    alone = decode.call(beams, prompt)
    assert len({tuple(tokens) for tokens, _ in alone}) == 3
    assert decode.call(forget)
    _, params = prefill.generate(prompt, 1, dict(REMOTE_DECODE))
    decode.generate(prompt, 1, params)
    before = counted(decode)
    assert decode.call(beams, prompt) == alone
    assert counted(decode) == before
    assert decode.call(forget)


def test_beams_that_compute_the_prompt_leave_nothing(pair):
    """Without that request, P and D compute the prompt, each for its own beams: they are alike, P keeps nothing
    for D, and D reads nothing."""
    prefill, decode = pair("qwen3", prefix=True, block_size=32)
    (prompt,) = prompts(random.Random(7), [LENGTH])
    before = counted(decode)
    made = prefill.call(beams, prompt)
    assert len({tuple(tokens) for tokens, _ in made}) == 3
    assert prefill.call(leases) == []
    assert decode.call(beams, prompt) == made
    assert counted(decode) == before
    assert decode.call(forget)


def beams(engine, prompt):
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    (made,) = engine.beam_search([{"prompt_token_ids": prompt}], params)
    return [(list(one.tokens[len(prompt) :]), round(one.cum_logprob, 3)) for one in made.sequences]
