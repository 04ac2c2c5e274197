"""A tiny model with random numbers that sees: Qwen2-VL, whose positions have three axes."""

import torch
from http_pair import byte_tokenizer

#: What stands for an image in a prompt.
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
#: Pixels of the smallest part that becomes one token.
CELL = 28


def save_pictured(folder):
    import transformers

    tokenizer = byte_tokenizer(SPECIAL)
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(SPECIAL)))
    config = transformers.Qwen2VLConfig(
        text_config=dict(
            vocab_size=512,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=256,
            max_position_embeddings=512,
            rope_parameters={
                "rope_type": "default",
                "mrope_section": [4, 6, 6],
                "rope_theta": 10000.0,
            },
        ),
        vision_config=dict(
            depth=2,
            embed_dim=64,
            hidden_size=128,
            num_heads=2,
            mlp_ratio=2,
            patch_size=14,
            spatial_merge_size=2,
            temporal_patch_size=2,
        ),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    torch.manual_seed(7)
    model = transformers.Qwen2VLForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(std=0.05 if "embed_tokens" in name else 0.1)
    model.save_pretrained(folder)
    pixels = {"shortest_edge": CELL * CELL, "longest_edge": 36 * CELL * CELL}
    transformers.Qwen2VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(size=pixels),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(size=pixels),
        chat_template="{{ messages }}",
    ).save_pretrained(folder)
    return folder


def picture(seed, width=6, height=4):
    """So many cells of noise."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, (height * CELL, width * CELL, 3), "uint8")
    return Image.fromarray(noise)
