"""Tiny models of every kind that transformers lists, and a step of theirs beside their own forward pass."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from grpo.config.groups import SamplingSettings
from grpo.prompt import Prompt
from grpo.rollout.sample import Rollout
from grpo.rollout.tokens import step_uniforms
from grpo.scoring.logprobs import score, token_logprobs
from grpo.scoring.packing import streams
from grpo.types import Batch

MAX_PARAMETERS = 50_000_000
"""The most that a tiny model has: one that is larger has a size that is not known here."""
EXACTNESS = 1e-5
TOKENS, PROMPTS = 8, ([5, 9, 4, 11, 3, 8, 2], [7, 6, 10, 12])
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_layers": 4,
    "n_heads": 4,
    "d_model": 32,
    "ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48,
    "decoder_layers": 4,
    "decoder_attention_heads": 4,
    "sliding_window": 6,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "rotary_dim": 4,
    "hidden_dropout": 0.0,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "n_groups": 1,
    "attention_hidden_size": 32,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "query_pre_attn_scalar": 8,
    "num_blocks": 4,
    "use_mamba_kernels": False,
}
"""Small sizes, for any configuration that has a setting of this name."""
MORE: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "mamba"]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "logits_scaling": 2.0},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "gpt_neo": {
        "num_layers": 4,
        "attention_types": [[["global", "local"], 2]],
        "num_heads": 4,
        "window_size": 6,
    },
    "gemma2": {"final_logit_softcapping": 5.0},
    "granite": {"logits_scaling": 2.0},
    "modernbert-decoder": {"local_attention": 6},
    "minicpm3": {"scale_emb": 1},
    "dots1": {"n_shared_experts": 1},
    "zaya": {"num_experts_per_tok": 1},
}
"""More settings of single kinds."""


def tiny(kind: str) -> PreTrainedModel:
    """Makes a model of this kind with random weights, in fp32, with attention as a run has it."""
    config = shrunk(CONFIG_MAPPING[kind], MORE.get(kind, {}))
    for name in vars(config):
        if name.endswith(("_pdrop", "dropout")):
            setattr(config, name, 0.0)
    of_kind = AutoModelForCausalLM._model_mapping[type(config)]
    attention = {"attn_implementation": "sdpa" if of_kind._supports_sdpa else "eager"}
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, **attention)
    if (count := sum(parameter.numel() for parameter in empty.parameters())) > MAX_PARAMETERS:
        raise ValueError(f"it has {count:,} parameters at the least sizes that are known here")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **attention).eval()


def shrunk(config: type[PretrainedConfig], more: Mapping[str, Any]) -> PretrainedConfig:
    """Makes a configuration with small sizes, of its parts, too."""
    usual = config()
    parts: dict[str, type[PretrainedConfig]] = getattr(usual, "sub_configs", {})
    known = inspect.signature(config).parameters
    sizes = {name: value for name, value in SIZES.items() if name in known or name in vars(usual)}
    if "kv_lora_rank" in sizes:  # such attention has as many heads of keys as of queries
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    of_parts = {
        name: {
            key: value for key, value in vars(shrunk(type(getattr(usual, name)), {})).items() if key in SIZES
        }
        for name in parts
        if isinstance(getattr(usual, name, None), PretrainedConfig)
    }
    return config(**sizes | of_parts | dict(more))


class _NoTexts:
    """As much of a tokenizer as sampling needs."""

    def batch_decode(self, rows: Sequence[object], **options: bool) -> list[str]:
        return [""] * len(rows)


def what_is_wrong(model: PreTrainedModel) -> str | None:
    """Compares a step of two groups of two rows, on three plans, with the model's own forward pass."""
    settings, uniforms = SamplingSettings(max_new_tokens=TOKENS), step_uniforms(4, TOKENS, seed=0, step=0)
    prompts = [Prompt("", "", {})] * 2
    batches = list[Batch]()
    for rows in (4, 2, 1):
        sampling = Rollout(model, _NoTexts(), PROMPTS, uniforms, settings, rows=rows, ends=range(0, 64, 16))  # type: ignore[arg-type]
        sampling.finish()
        batches.append(sampling.batch(prompts))
    batch = batches[0]
    exact = list[Tensor]()
    for row, ids in enumerate(batch.by_row(batch.ids)):
        text = torch.tensor([PROMPTS[row // 2] + ids.tolist()])
        logits = model(input_ids=text, use_cache=False).logits[0, -len(ids) - 1 : -1]
        exact.append(logits.log_softmax(-1).gather(1, ids.unsqueeze(1))[:, 0])
    weights = torch.randn(len(batch.ids), generator=torch.Generator().manual_seed(0))
    (torch.cat(exact) * weights).sum().backward()
    expected, logp = _gradient(model), torch.cat(exact).detach()
    for other in batches:
        if not torch.equal(other.ids, batch.ids):
            return "tokens depend on how many rows are sampled at once"
        if (apart := (other.sampler_logp - logp).abs().max().item()) > EXACTNESS:
            return f"log-probs of the sampler are {apart:.1e} nats off"
    for rows in (4, 1):
        scored = score(model, batch, rows=rows, temperature=1.0, dtype=torch.float32)
        if (apart := (scored - logp).abs().max().item()) > EXACTNESS:
            return f"log-probs of the scorer are {apart:.1e} nats off"
        for stream in streams(batch, rows):
            own = weights[stream.tokens]
            token_logprobs(
                model, stream, temperature=1.0, dtype=torch.float32, slope=lambda _, part, own=own: own[part]
            )
        if (apart := _difference(_gradient(model), expected)) > EXACTNESS:
            return f"the gradient is {apart:.1e} of its norm off, {rows} rows at once"
    return None


def _gradient(model: PreTrainedModel) -> list[Tensor]:
    """Returns what parameters have, or zeros, and takes it from them."""
    gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return gradient


def _difference(gradient: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    apart = sum((one - other).square().sum() for one, other in zip(gradient, expected, strict=True))
    return float((apart / sum(each.square().sum() for each in expected)) ** 0.5)
