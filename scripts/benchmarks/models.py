"""The models of the benchmarks: of known shapes, with random weights, and rook-tiny's tokenizer."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from grpo.model.names import BUNDLED_FOLDER


def gpt2(layers: int, width: int, **shape: Any) -> PretrainedConfig:
    """With heads of 64 and rook-tiny's vocabulary, unless told otherwise."""
    common = {"n_head": max(2, width // 64), "n_positions": 512, "vocab_size": 902}
    return GPT2Config(n_layer=layers, n_embd=width, bos_token_id=0, eos_token_id=0, **{**common, **shape})


GPT2_124M = gpt2(12, 768, n_positions=1024, vocab_size=50257)
GPT2_30M = gpt2(8, 512)
GPT2_3M = gpt2(6, 192, n_head=6)
GPT2_MINUTE = gpt2(2, 32, n_positions=256)
LIKE_ROOK_TINY = AutoConfig.from_pretrained(BUNDLED_FOLDER)


LLAMA_3B = LlamaConfig(
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=28,
    num_attention_heads=24,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
)
"""As Llama 3.2 has it."""


def qwen2(layers: int, width: int, mlp_width: int, heads: int) -> PretrainedConfig:
    """Two heads of keys and values, and a tied vocabulary, as the small models of Qwen 2.5 have them."""
    return Qwen2Config(
        hidden_size=width,
        intermediate_size=mlp_width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        vocab_size=151936,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    )


QWEN_0_5B = qwen2(24, 896, 4864, 14)
QWEN_1_5B = qwen2(28, 1536, 8960, 12)


def write_shape(folder: Path, shape: PretrainedConfig) -> Path:
    """The folder of such a model without weights, for a plan."""
    shape.save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUNDLED_FOLDER).save_pretrained(folder)
    return folder


def write_model(folder: Path, shape: PretrainedConfig) -> Path:
    """The folder of such a model, as `--model` takes it. Texts of a GPT-2 never end."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    if shape.model_type == "gpt2":
        _never_end(model)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUNDLED_FOLDER).save_pretrained(folder)
    return folder


def _never_end(model: PreTrainedModel) -> None:
    """One feature is 1 behind the last norm; the end of a text, and nothing else, is made unlikely by it."""
    with torch.no_grad():
        embeddings, norm = model.transformer.wte.weight, model.transformer.ln_f
        norm.weight[0], norm.bias[0] = 0.0, 1.0
        embeddings[:, 0] = 0.0
        embeddings[model.config.eos_token_id, 0] = -1e4
