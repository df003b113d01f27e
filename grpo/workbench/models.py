"""The models that the workbench trains: a named one, or one that is made from numbers."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from grpo.model.activation_checkpointing import recompute_activations
from grpo.model.adapters import add_adapters, store_base
from grpo.model.load import ModelSource, shape_of
from grpo.model.target import Target
from grpo.workbench.settings import ModelChoice, Task


def model_shape(choice: ModelChoice) -> PretrainedConfig:
    """ValueError where a named model cannot be had. One from numbers has no dropout."""
    if choice.arch is None:
        return shape_of(choice.model_name)
    special: dict[str, Any] = {
        "n_inner": choice.d_ff,
        "activation_function": "gelu_pytorch_tanh",
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    if choice.arch == "llama":
        special = {
            "intermediate_size": choice.d_ff or -(-8 * choice.width // (3 * 64)) * 64,
            "num_key_value_heads": choice.kv_heads or choice.heads,
            "rope_parameters": {"rope_type": "default", "rope_theta": choice.rope_theta},
        }
    return AutoConfig.for_model(
        choice.arch,
        hidden_size=choice.width,
        num_hidden_layers=choice.layers,
        num_attention_heads=choice.heads,
        max_position_embeddings=choice.context,
        vocab_size=choice.vocab,
        tie_word_embeddings=not choice.untied,
        bos_token_id=0,
        eos_token_id=0,
        **special,
    )


def num_parameters(shape: PretrainedConfig) -> int:
    """Parameters of a model of this shape, tied ones once; nothing is allocated."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    return sum(parameter.numel() for parameter in model.parameters())


def load_model(task: Task, target: Target) -> PreTrainedModel:
    """A named model with its own weights, and adapters if they are to be trained; or one from numbers."""
    if task.arch is not None:
        return random_model(target, seed=task.seed)
    model = ModelSource(task.model_name).load(target).model
    if task.uses_lora:
        add_adapters(model, task)
        store_base(model, target.dtype)
    return model


def random_model(target: Target, *, seed: int = 0) -> PreTrainedModel:
    """A model with random weights in fp32 (float64 for fp64), as training holds it."""
    torch.manual_seed(seed)
    with target.device:
        model = AutoModelForCausalLM.from_config(
            target.model_config, dtype=target.master_dtype, attn_implementation=target.attention
        )
    if target.on_cpu:
        recompute_activations(model)
    return model.to(target.device).eval()
