"""The native decoder computes what a model does without any cache, whatever its architecture."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import CONTEXT, LONG_MOVE_PROMPT, let_norms_be_exact
from rich.console import Console
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

import grpo.rollout.decoder
from grpo.config.groups import SamplingSettings
from grpo.rollout.decoder import check_decoder, has_static_cache, make_decoder
from grpo.rollout.generic import GenericDecoder
from grpo.rollout.native import NativeDecoder
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run
from grpo.run.tracking import COMPLETIONS_FILE, read_lines
from grpo.trainer import Trainer
from grpo.types import Prompt, Rollout

NO_GROUPS = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 96, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
SIZES = {**NO_GROUPS, "num_key_value_heads": 2}
WINDOW = {"sliding_window": 12}
FAMILY: dict[str, PretrainedConfig] = {
    "gpt2": GPT2Config(vocab_size=60, n_positions=96, n_embd=32, n_layer=3, n_head=4, pad_token_id=0),
    "llama": LlamaConfig(**SIZES), "qwen2": Qwen2Config(**SIZES), "smollm3": SmolLM3Config(**SIZES),
    "qwen2, windows": Qwen2Config(**SIZES, **WINDOW, use_sliding_window=True, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=16), "mistral": MistralConfig(**SIZES, **WINDOW),
    "phi3": Phi3Config(**SIZES, **WINDOW),
    "gemma3": Gemma3TextConfig(**SIZES, **WINDOW, head_dim=16, query_pre_attn_scalar=16),
}  # fmt: skip


def made(config: PretrainedConfig, dtype: torch.dtype = torch.float64):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    if dtype == torch.float64:
        let_norms_be_exact(model)
    return model


@pytest.mark.parametrize("kind", [NativeDecoder, GenericDecoder])
@pytest.mark.parametrize("name", FAMILY)
@torch.no_grad()
def test_a_token_is_what_the_whole_text_says(name, kind):
    """Prompts of one token to three windows, groups that leave, and one that starts in another's place."""
    model = made(FAMILY[name])
    texts = [[*range(1, n + 1)] for n in (36, 1, 20) for _ in range(2)]
    decoder = kind(model, 20) if kind is NativeDecoder else kind(model)
    logits = decoder.prefill(texts[::2], 2)
    for turn in range(20):
        if turn == 12:
            decoder.keep([0, 2])
            texts, logits = texts[:2] + texts[4:], logits[[0, 1, 4, 5]]
        if turn == 15 and kind is NativeDecoder:
            texts[:2] = [[5, 6, 7], [5, 6, 7]]
            logits[:2] = decoder.replace([0], texts[:1])
        for text, ours in zip(texts, logits, strict=True):
            theirs = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
            assert torch.allclose(ours, theirs, atol=1e-12, rtol=0)
        tokens = (torch.arange(len(texts)) * 7 + turn) % 60
        texts = [[*text, token] for text, token in zip(texts, tokens.tolist(), strict=True)]
        logits = decoder.next_step()[1](tokens)


def sized_for(tokenizer, config: PretrainedConfig) -> PretrainedConfig:
    """The same, large enough for our prompts."""
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT}
    return type(config).from_dict(config.to_dict() | sizes)


@pytest.mark.parametrize("name", FAMILY)
def test_tokens_do_not_depend_on_rows_or_decoder(name, tokenizer, none_refused):
    """Prompts of 2 to 30 tokens, all rows at once, by parts with groups that wait for a place, one by one."""
    model = made(sized_for(tokenizer, FAMILY[name]))
    many = [Prompt(f"{n}", LONG_MOVE_PROMPT[:n], {}) for n in (30, 2, 17, 5, 24, 9)]
    uniforms, settings = step_uniforms(2 * len(many), 12, seed=0, step=1), SamplingSettings(max_new_tokens=12)

    def sample(rows: int) -> Rollout:
        ends = range(0, len(tokenizer), 7)
        return rollout(model, tokenizer, many, uniforms, settings, rows=rows, ends=ends)

    whole, *others = [sample(rows) for rows in (12, 4, 1)]
    grpo.rollout.decoder._refused.add(model.config.model_type)
    assert len(whole.lengths.unique()) > 3 and not has_static_cache(model)
    for sampled in [*others, sample(12)]:
        assert torch.equal(sampled.completion_ids, whole.completion_ids)
        assert torch.allclose(sampled.sampler_logp, whole.sampler_logp, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2, windows", "gemma3"])
@pytest.mark.usefixtures("made_up_plans")
def test_tokens_after_resuming_are_those_of_a_run_that_went_on(name, tokenizer, config, tmp_path):
    model = made(sized_for(tokenizer, FAMILY[name]))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config = replace(
        config, steps=2, model=str(tmp_path / "model"), precision="fp64", eval_prompts=0,
        rollout_rows=4, score_rows=8, train_rows=8,
    )  # fmt: skip

    def train(**changes: object) -> Path:
        with open_run(replace(config, **changes)) as run:
            Trainer(run, Console(quiet=True)).train(StopRequest())
            return run.folder

    whole, half = train(name="whole"), train(name="half", steps=1)
    train(name="half", resume=half)
    assert read_lines(half / COMPLETIONS_FILE) == read_lines(whole / COMPLETIONS_FILE)
    assert {line["step"] for line in read_lines(half / COMPLETIONS_FILE)} == {1, 2}


@pytest.fixture
def none_refused(monkeypatch):
    monkeypatch.setattr(grpo.rollout.decoder, "_refused", set())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BloomConfig(vocab_size=60, hidden_size=32, n_layer=2, n_head=4), "cannot be called by name"),
        (DeepseekV3Config(**NO_GROUPS, n_routed_experts=2, num_experts_per_tok=1, n_group=1, topk_group=1,
            moe_intermediate_size=32, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
            v_head_dim=8), "no attribute"),
    ], ids=["bloom", "deepseek"],
)  # fmt: skip
def test_what_computes_something_else_decodes_the_usual_way_and_says_so(config, reason, logged, none_refused):
    model = AutoModelForCausalLM.from_config(config).eval()
    check_decoder(model)
    assert not has_static_cache(model) and isinstance(make_decoder(model, 4), GenericDecoder)
    assert len(logged) == 1 and "growing cache" in logged[0] and reason in logged[0]


def test_one_that_gives_other_logits_is_found_out(logged, none_refused, monkeypatch):
    model = made(FAMILY["llama"], torch.float32)
    check_decoder(model)
    assert has_static_cache(model) and not logged
    monkeypatch.setattr("grpo.rollout.static_cache.StaticLayer.attend", lambda self, query, scale: query)
    check_decoder(model)
    assert not has_static_cache(model) and "nats wrong" in logged[0]
