"""Kinds of models that do more than attention: a step is what their own forward pass says, on any plan."""

import dataclasses

import pytest
import torch
from conftest import CONTEXT
from families import OTHERS, another, made, shaped
from whole_runs import assert_close_outcome, assert_same_outcome, outcome, train

from grpo import phases
from grpo.config import SettingsError
from grpo.config.groups import SamplingSettings
from grpo.model.load import Policy, load_policy
from grpo.model.ways import READING, choose_reading, decoding_of, reading_of
from grpo.rollout.decoder import check_decoder
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.run.loading import shard_models
from grpo.scoring.logprobs import score, token_logprobs
from grpo.scoring.model_checks import check_scorer
from grpo.scoring.packing import streams
from grpo.scoring.stream import Texts

FAST = {"granite", "cohere", "cohere2", "nanochat", "olmo3", "ministral", "gemma2", "gpt_oss"}
PADDED = {"bloom", "gptj"}
"""The others have recurrent layers, which would remember padding. RWKV mixes rows that decode together, and
Nemotron-H computes something else for a token alone than within its text."""


def learned(model, batch, weights, rows: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Entropies of all tokens, and the gradient of a weighted sum of log-probs, by so many rows at once."""
    entropies = torch.zeros_like(weights)
    for stream in streams(batch, rows):
        own = weights[stream.tokens]
        _, entropies[stream.tokens] = token_logprobs(
            model,
            stream,
            temperature=0.7,
            dtype=torch.float32,
            entropy=True,
            slope=lambda _, part, own=own: own[part],
        )
    gradient = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return entropies, gradient


def difference(gradient, expected) -> float:
    """Returns the distance, as a share of the global norm of what is expected."""
    apart = sum((one - other).square().sum() for one, other in zip(gradient, expected, strict=True))
    return (apart / sum(each.square().sum() for each in expected)).sqrt().item()


@pytest.mark.parametrize("name", OTHERS)
def test_a_step_is_what_a_plain_forward_pass_says_on_any_plan(name, tokenizer, prompts):
    """Log-probs of sampler and scorer, entropies, gradients; and tokens and sums for other rows at once."""
    model = Policy(another(name, len(tokenizer), CONTEXT), tokenizer, None).model
    check_decoder(model)
    check_scorer(model, 64)
    assert reading_of(model) == ("streams" if name in FAST else "padded rows")
    assert decoding_of(model.config) == (
        "a static cache"
        if name in FAST
        else "padded rows"
        if name in PADDED
        else {"rwkv": "rows one by one", "nemotron_h": "whole texts"}.get(name, "rows of one length")
    )
    prompts = [*prompts, prompts[0]]  # two of one length
    settings = SamplingSettings(max_new_tokens=12, temperature=0.7)
    uniforms = step_uniforms(2 * len(prompts), 12, seed=0, step=1)
    ends = {"ends": range(0, len(tokenizer), 9)}
    sampled, *others = [
        rollout(model, tokenizer, prompts, uniforms, settings, rows=rows, **ends) for rows in (10, 4, 2, 1)
    ]
    assert len(sampled.lengths.unique()) > 3
    exact, entropies = [], []
    for row, ids in enumerate(sampled.by_row(sampled.ids)):
        text = torch.tensor([sampled.context_ids[row // 2] + ids.tolist()])
        logits = model(input_ids=text, use_cache=False).logits[0, -len(ids) - 1 : -1] / 0.7
        chances = torch.distributions.Categorical(logits=logits)
        exact.append(chances.log_prob(ids))
        entropies.append(chances.entropy())
    weights = torch.randn(len(sampled.ids), generator=torch.Generator().manual_seed(0))
    (torch.cat(exact) * weights).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    tolerance = {"atol": 2e-5, "rtol": 0}
    exact = torch.cat(exact).detach()
    for each in sampled, *others:
        assert torch.equal(each.ids, sampled.ids)
        assert torch.allclose(each.sampler_logp, exact, **tolerance)
    for rows in 10, 3, 1:
        scored = score(model, sampled, rows=rows, temperature=0.7, dtype=torch.float32)
        assert torch.allclose(scored, exact, **tolerance)
        found, gradient = learned(model, sampled, weights, rows)
        assert torch.allclose(found, torch.cat(entropies).detach(), **tolerance)
        assert difference(gradient, expected) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_every_way_to_score_is_right_for_a_model_that_can_do_all(name):
    """In float64, to rounding: log-probs and gradients of rows of many lengths, with two prompts."""
    model = made(shaped(name))
    texts = Texts([[1, 2, 3, 4], [*range(5, 25)]], [0, 1, 1, 0, 1], [[7] * n for n in (3, 9, 3, 19, 1)])
    weights = torch.randn(sum(map(len, texts.rows)), dtype=torch.float64)
    results = []
    for way in READING:
        choose_reading(way, model.config)
        logp, _ = token_logprobs(
            model, texts.stream(), temperature=1.0, dtype=torch.float64, slope=lambda _, part: weights[part]
        )
        results.append([logp, *(parameter.grad.clone() for parameter in model.parameters())])
        model.zero_grad()
    for other in results[1:]:
        for one, expected in zip(other, results[0], strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2", "gemma2"])
def test_accidents_and_breaks_change_nothing(name, config, tokenizer, tmp_path, monkeypatch):
    """Memory runs out in each phase of step 1 (I4); another run is stopped after step 1 and goes on (I5)."""
    another(name, len(tokenizer), CONTEXT).save_pretrained(tmp_path / name)
    tokenizer.save_pretrained(tmp_path / name)
    config = dataclasses.replace(config, model=str(tmp_path / name), steps=3, max_new_tokens=8)

    def trained(folder: str, **options):
        torch.manual_seed(0)  # loading Qwen 3.5 draws numbers
        changed = dataclasses.replace(config, name=folder, checkpoint_interval=1, keep_checkpoints=9)
        return train(dataclasses.replace(changed, resume=options.pop("resume", None)), **options)

    straight = outcome(trained("straight"))
    assert_same_outcome(straight, outcome(trained("cut", resume=trained("cut", stop_after=1))))
    tries: dict[str, list[int]] = {"begin_rollout": [], "score": [], "accumulate_grpo": []}

    def short_of_memory(phase: str, work):
        def run(*given, rows, **options):
            tries[phase].append(rows)
            if len(tries[phase]) <= 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return work(*given, rows=rows, **options)

        return run

    for phase in tries:
        monkeypatch.setattr(phases, phase, short_of_memory(phase, getattr(phases, phase)))
    assert_close_outcome(outcome(trained("short")), straight, exactness=1e-5)
    assert all(rows[0] > rows[-1] for rows in tries.values())


@pytest.mark.parametrize("name", ["lfm2", "rwkv", "nemotron_h"])
def test_kinds_that_go_through_by_length_are_not_sharded(name, tokenizer):
    """Processes would have to make the same passes, and have texts of other lengths."""
    model = another(name, len(tokenizer), CONTEXT)
    check_decoder(model)
    with pytest.raises(SettingsError, match="leave out --shard, or give another --model"):
        shard_models(Policy(model, tokenizer, None), None)


def test_rwkv_is_saved_as_it_is_trained(tokenizer, tmp_path):
    """In evaluation transformers divides weights of its later layers by 2, 4, … where they stand."""
    model = another("rwkv", len(tokenizer), CONTEXT)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), torch.device("cpu"), "fp32")
    check_scorer(policy.model, 64)
    assert all(torch.equal(weight, before[name]) for name, weight in policy.model.state_dict().items())
    with policy.as_it_came():
        assert policy.model.config.rescale_every == 6
