"""The kinds that people use most, as they come: real windows, weights in bf16, adapters, a base in 4 bits."""

import dataclasses

import pytest
import torch
from families import SIZES
from transformers import AutoConfig, AutoModelForCausalLM

from grpo.model.numerics import computing_in
from grpo.model.ways import decoding_of, reading_of
from grpo.scoring.logprobs import score
from grpo.trainer import Trainer

LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
COMMON = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "smollm3": {},
    "mistral": {"sliding_window": 4096},
    "phi3": {"sliding_window": 2047},
    "gemma3_text": {"sliding_window": 512, "head_dim": 16},
    "olmo3": {"sliding_window": 4096},
    "granite": {"logits_scaling": 4.0, "attention_multiplier": 0.3},
    "qwen3_5_text": {
        **LINEAR,
        "linear_value_head_dim": 16,
        "head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
}
HYBRID = {"qwen3_5_text", "lfm2"}
WHOLE = {"precision": "bf16"}
ON_4_BITS = {"precision": "bf16", "lora_rank": 4, "load_in_4bit": True}
OTHERS = {"adapters, bf16": {"precision": "bf16", "lora_rank": 4}, "whole, fp16": {"precision": "fp16"}}
CASES = [
    *(pytest.param(name, WHOLE, id=f"{name}, whole, bf16") for name in COMMON),
    *(pytest.param(name, ON_4_BITS, id=f"{name}, adapters, 4 bits") for name in COMMON),
    *(
        pytest.param(name, changes, id=f"{name}, {mode}")
        for name in ("llama", "gemma3_text", "qwen3_5_text")
        for mode, changes in OTHERS.items()
    ),
]


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_a_step_in_16_bits_goes_the_way_that_one_in_fp32_goes(name, changes, config, tokenizer, tmp_path):
    """Its log-probs are those of the model's own pass over whole texts, to the rounding of 16 bits."""
    if "load_in_4bit" in changes:
        pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 64, "initializer_range": 0.1, "num_key_value_heads": 2}
    sizes |= {"vocab_size": len(tokenizer), "max_position_embeddings": 8192}
    shape = AutoConfig.for_model(name, **sizes | COMMON[name])
    AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    if "lora_rank" in changes:
        changes = changes | {"lora_targets": ("all-linear",)}
    trainer = Trainer(
        dataclasses.replace(
            config, model=str(tmp_path / "m"), steps=1, learning_rate=1e-8, group_size=2, **changes
        )
    )
    (step,) = trainer
    (model, _, target), batch = trainer.run.policy, step.batch
    assert reading_of(model) == ("padded rows" if name in HYBRID else "streams")
    assert decoding_of(model.config) == ("rows of one length" if name in HYBRID else "a static cache")
    scored = score(model, batch, rows=4, temperature=1.0, dtype=target.dtype)
    own = []
    for group, ids in zip(batch.group.tolist(), batch.by_row(batch.ids), strict=True):
        text = torch.tensor([batch.context_ids[group] + ids.tolist()])
        with torch.no_grad(), computing_in(target.dtype, model.device, keeps_casts=False):
            logits = model(input_ids=text, use_cache=False).logits[0, -len(ids) - 1 : -1]
        own.append(logits.float().log_softmax(-1).gather(1, ids.unsqueeze(1))[:, 0])
    spread = torch.cat(own).std()
    rounding = 0.005 if target.dtype == torch.bfloat16 else 0.0005
    assert (scored - torch.cat(own)).abs().mean() < 2 * rounding * spread
    assert (batch.sampler_logp - torch.cat(own)).abs().mean() < 4 * rounding * spread
