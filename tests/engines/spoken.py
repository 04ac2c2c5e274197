"""A tiny model with random numbers that hears: Whisper, with an encoder and a decoder."""

import torch
from http_pair import byte_tokenizer

#: Where an answer begins.
START = "<|startoftranscript|>"
#: Samples in a second of sound.
RATE = 16000


def save_spoken(folder):
    import transformers

    tokenizer = byte_tokenizer([START])
    (start,) = tokenizer.convert_tokens_to_ids([START])
    config = transformers.WhisperConfig(
        vocab_size=512,
        d_model=128,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=256,
        decoder_ffn_dim=256,
        num_mel_bins=80,
        max_source_positions=50,
        max_target_positions=448,
        decoder_start_token_id=start,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(7)
    model = transformers.WhisperForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "encoder_attn" in name and weight.dim() >= 2:
                # What is heard must outweigh what was said.
                weight.normal_(std=0.4)
            elif weight.dim() >= 2:
                weight.normal_(std=0.05 if "embed_tokens" in name else 0.1)
    model.save_pretrained(folder)
    # A second of sound: 100 frames, of which the encoder makes 50.
    ears = transformers.WhisperFeatureExtractor(feature_size=80, chunk_length=1)
    transformers.WhisperProcessor(feature_extractor=ears, tokenizer=tokenizer).save_pretrained(folder)
    return folder


def tone(pitch):
    """A second of it, and its rate."""
    import numpy as np

    return np.sin(2 * np.pi * pitch * np.arange(RATE) / RATE).astype("float32"), RATE
