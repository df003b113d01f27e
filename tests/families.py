"""Small models of many families, with random weights, in float64."""

import torch
from conftest import let_norms_be_exact
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 96, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
WINDOW = {"sliding_window": 12}
FAMILY = {
    "gpt2": {}, "gpt2, unscaled": {"scale_attn_weights": False},
    "gpt2, by layer": {"scale_attn_by_inverse_layer_idx": True},
    "llama": {}, "qwen2": {}, "smollm3": {}, "qwen3": {"head_dim": 16}, "mistral": WINDOW, "phi3": WINDOW,
    "qwen2, windows": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "gemma3_text": {**WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "cohere2": {**WINDOW, "logit_scale": 0.5},
}  # fmt: skip


def shaped(name: str) -> PretrainedConfig:
    groups = {} if name.startswith("gpt2") else {"num_key_value_heads": 2}
    return AutoConfig.for_model(name.partition(",")[0], **SIZES, **groups, **FAMILY[name])


def made(config: PretrainedConfig):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="sdpa").eval()
    let_norms_be_exact(model)
    return model
