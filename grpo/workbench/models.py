"""The workbench's models: what their shapes say, and making or loading them."""

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from grpo.config.groups import Precision
from grpo.model.cpu.feed_forward import slice_feed_forward
from grpo.model.load import load_policy
from grpo.model.target import choose_attention
from grpo.workbench.spec import ModelSpec


def context_of(config: PretrainedConfig) -> int:
    """Tokens a model's positions reach."""
    return int(getattr(config.get_text_config(decoder=True), "max_position_embeddings", 2**20))


def random_model(
    config: PretrainedConfig, device: torch.device, compute_dtype: torch.dtype, *, seed: int = 0
) -> PreTrainedModel:
    """A model with random weights in fp32 (float64 for float64), as training holds it."""
    torch.manual_seed(seed)
    exact = torch.float64 if compute_dtype == torch.float64 else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=exact, attn_implementation=choose_attention(device, compute_dtype)
        )
    if device.type == "cpu":
        slice_feed_forward(model)
    return model.to(device).eval()


def load_or_make(spec: ModelSpec, device: torch.device, compute_dtype: torch.dtype) -> PreTrainedModel:
    """A named model with its own weights, or one from numbers with random ones, as training holds it."""
    if spec.arch is not None:
        return random_model(spec.config(), device, compute_dtype)
    precision: Precision = {torch.bfloat16: "bf16", torch.float64: "fp64"}.get(compute_dtype, "fp32")  # type: ignore[assignment]
    return load_policy(spec.name, device, precision).model


def num_parameters(config: PretrainedConfig) -> int:
    """Parameters of a model of this shape, tied ones once; nothing is allocated."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())
