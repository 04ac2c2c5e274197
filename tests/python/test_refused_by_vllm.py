"""What vLLM itself does not hand over, whatever the connector: the census and the page on requests say so."""

from unittest.mock import MagicMock

import pytest
from stand_in import Backend  # noqa: F401  first: it sets the environment up

# isort: split
from vllm.config import KVTransferConfig
from vllm.v1.core.sched.scheduler import Scheduler


def test_no_encoder_decoder_model_runs_with_a_connector():
    """Whisper and its kin: what the census says of cross attention."""
    config = MagicMock()
    config.observability_config.kv_cache_metrics = False
    config.model_config.is_encoder_decoder = True
    config.kv_transfer_config = KVTransferConfig(kv_connector="FerryConnector", kv_role="kv_both")
    with pytest.raises(AssertionError, match="Encoder-decoder models are not currently supported with KV"):
        Scheduler(config, MagicMock(), MagicMock(), 16)


def test_beams_do_not_get_the_parameters_of_a_hand_over():
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    said = [{"role": "user", "content": "it"}]
    params = {"do_remote_prefill": True, "remote_engine_id": "P"}
    for asked in (
        CompletionRequest(prompt="it", use_beam_search=True, n=3, kv_transfer_params=params),
        ChatCompletionRequest(messages=said, use_beam_search=True, n=3, kv_transfer_params=params),
    ):
        assert asked.to_sampling_params(8, {}).extra_args == {"kv_transfer_params": params}
        assert "remote_engine_id" not in repr(asked.to_beam_search_params(8, {}))
