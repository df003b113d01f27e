"""Small models of many families, with random weights, in float64."""

import torch
from conftest import let_norms_be_exact
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LINEAR_ATTENTION = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
    "initializer_range": 0.1,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
WINDOW = {"sliding_window": 12}
FAMILY = {
    "gpt2": {},
    "gpt2, unscaled": {"scale_attn_weights": False},
    "gpt2, by layer": {"scale_attn_by_inverse_layer_idx": True},
    "llama": {},
    "qwen2": {},
    "smollm3": {},
    "qwen3": {"head_dim": 16},
    "mistral": WINDOW,
    "phi3": WINDOW,
    "qwen2, windows": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "gemma3_text": {**WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "cohere2": {**WINDOW, "logit_scale": 0.5},
}

OTHERS = {
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5, "sliding_window": 12},
    "nanochat": {"final_logit_softcapping": 3.0},
    "olmo3": {"head_dim": 8, "sliding_window": 12},
    "ministral": {"head_dim": 8, "sliding_window": 12},
    "gemma2": {
        "head_dim": 8,
        "sliding_window": 12,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 3.0,
    },
    "gpt_oss": {"head_dim": 8, "sliding_window": 12, "num_local_experts": 2, "num_experts_per_tok": 1},
    "bloom": {"n_layer": 2, "n_head": 4},
    "gptj": {"n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "qwen3_5_text": LINEAR_ATTENTION,
    "qwen3_next": {
        **LINEAR_ATTENTION,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
    "granitemoehybrid": {
        **MAMBA,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 16,
        "logits_scaling": 2.0,
    },
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "head_dim": 8,
        "layers_block_type": ["mamba", "attention", "mlp"],
    },
    "mamba": {"state_size": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "state_size": 4, "n_groups": 1},
    "rwkv": {"attention_hidden_size": 32, "num_hidden_layers": 7},
}
"""Kinds that do more to logits, to scores of attention or across tokens than those above."""


def shaped(name: str) -> PretrainedConfig:
    groups = {} if name.startswith("gpt2") else {"num_key_value_heads": 2}
    return AutoConfig.for_model(name.partition(",")[0], **SIZES, **groups, **FAMILY[name])


def made(config: PretrainedConfig):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="sdpa").eval()
    let_norms_be_exact(model)
    return model


def another(name: str, vocabulary: int = 60, context: int = 96, dtype: torch.dtype = torch.float32):
    """One of OTHERS with random weights, with attention as a run has it."""
    torch.manual_seed(0)
    sizes = {**SIZES, "num_key_value_heads": 2, "vocab_size": vocabulary, "max_position_embeddings": context}
    config = AutoConfig.for_model(name, **sizes | OTHERS[name])
    kind = AutoModelForCausalLM._model_mapping[type(config)]
    attention = "sdpa" if kind._supports_sdpa else "eager"
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()
