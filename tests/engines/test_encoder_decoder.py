"""A model with an encoder and a decoder (Whisper): vLLM runs it on a CPU, and with no connector at all."""

import pytest
from serving import Server, sampled
from spoken import START, save_spoken, tone

pytestmark = pytest.mark.more

OPTIONS = {
    "skip_tokenizer_init": False,
    "block_size": 32,
    "max_model_len": 128,
    "limit_mm_per_prompt": {"audio": 1},
}


@pytest.fixture(scope="module")
def model(folder):
    return save_spoken(folder / "spoken")


def hear(engine, pitch):
    prompt = {
        "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": tone(pitch)}},
        "decoder_prompt": f"{START}ab",
    }
    (made,) = engine.generate([prompt], sampled(12), use_tqdm=False)
    return list(made.outputs[0].token_ids)


def test_it_runs_alone(model):
    """So it is the connector that an engine stops at, below, and not the model."""
    server = Server(model, None, **OPTIONS)
    try:
        low, high = server.call(hear, 200), server.call(hear, 3000)
        assert low != high and server.call(hear, 200) == low
    finally:
        server.close()


def test_it_is_refused_by_name_and_told_how_to_start(model):
    with pytest.raises(AssertionError, match="CrossAttentionSpec: .*start it without a connector"):
        Server(model, "kv_both", **OPTIONS)


def test_vllm_refuses_it_with_its_own_connector(model):
    words = "Encoder-decoder models are not currently supported with KV connectors"
    with pytest.raises(AssertionError, match=words):
        Server(model, "kv_both", stock=True, **OPTIONS)
