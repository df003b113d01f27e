"""Sampling a step's completions: prompts once a group, finished groups leave, order plays no part."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.decode import CacheBytes, make_decoder
from grpo.sampling import SamplingSettings, sample_tokens
from grpo.values import Prompt, Rollout

_CHECK_EVERY = 8
"""Tokens between looks at the cache, and at who has finished on an accelerator, which waits for it."""


def tokenize_prompts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, *, longest: int
) -> list[list[int]]:
    """Token ids of each prompt, without special tokens. ValueError for an empty or too long one."""
    prompt_ids = tokenizer([prompt.text for prompt in prompts], add_special_tokens=False)["input_ids"]
    for prompt, ids in zip(prompts, prompt_ids, strict=True):
        if not ids:
            raise ValueError(f"prompt {prompt.id} is empty: a prompt needs at least one token.")
        if len(ids) > longest:
            raise ValueError(
                f"prompt {prompt.id} has {len(ids)} tokens, but the model's context leaves {longest} beside "
                "max_new_tokens: shorten the prompt, lower max_new_tokens, or choose another model."
            )
    return prompt_ids


@torch.no_grad()
def rollout(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    uniforms: Tensor,
    settings: SamplingSettings,
    *,
    rows: int,
    watch_cache: Callable[[int, CacheBytes], None] | None = None,
) -> Rollout:
    """Sample N = len(uniforms) completions, N / B of each prompt, at most `rows` at once.

    uniforms: (N, max_new_tokens), see `step_uniforms`. Whole groups are sampled together where
    `rows` allows, and a group is split where it does not; neither changes what is sampled.
    watch_cache: told, every few tokens, how many the first rows have and what their cache takes up.
    """
    prompt_ids = tokenize_prompts(prompts, tokenizer, longest=context_length(model) - settings.max_new_tokens)
    num_rows = len(uniforms)
    group_size = num_rows // len(prompts)
    ids = torch.zeros(num_rows, settings.max_new_tokens, dtype=torch.long)
    logp = torch.zeros(num_rows, settings.max_new_tokens, dtype=_exact_dtype(model))
    lengths = torch.zeros(num_rows, dtype=torch.long)
    terminated = torch.zeros(num_rows, dtype=torch.bool)

    width = min(rows, group_size)  # rows of one group that decode together
    for columns in torch.arange(group_size).split(width):
        for groups in torch.arange(len(prompts)).split(max(1, rows // width)):
            chunk = (groups.unsqueeze(1) * group_size + columns).flatten()
            ids[chunk], logp[chunk], lengths[chunk], terminated[chunk] = _sample(
                model, [prompt_ids[group] for group in groups], uniforms[chunk], settings,
                end=tokenizer.eos_token_id, watch_cache=watch_cache,
            )  # fmt: skip
            watch_cache = None
    longest = int(lengths.max())
    return Rollout(
        prompts=list(prompts),
        prompt_ids=prompt_ids,
        completion_ids=ids[:, :longest],
        lengths=lengths,
        terminated=terminated,
        sampler_logp=logp[:, :longest],
        completions=tokenizer.batch_decode(
            [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)],
            skip_special_tokens=True,
        ),
    )


def context_length(model: PreTrainedModel) -> int:
    """Tokens the model's positions reach, or its attention, where layers see a window only."""
    config = model.config.get_text_config(decoder=True)
    limits = (getattr(config, name, None) for name in ("max_position_embeddings", "sliding_window"))
    return min((limit for limit in limits if limit), default=2**20)


def _sample(
    model: PreTrainedModel,
    prompt_ids: list[list[int]],
    uniforms: Tensor,
    settings: SamplingSettings,
    *,
    end: int,
    watch_cache: Callable[[int, CacheBytes], None] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sample the rows of one chunk: ids and log-probs (R, max_new_tokens), lengths, terminated."""
    device = model.device
    num_rows, num_positions = uniforms.shape
    per_prompt = num_rows // len(prompt_ids)
    uniforms = uniforms.to(device)
    ids = torch.zeros(num_rows, num_positions, dtype=torch.long, device=device)
    logp = torch.zeros(num_rows, num_positions, dtype=_exact_dtype(model), device=device)
    lengths = torch.full((num_rows,), num_positions, device=device)
    terminated = torch.zeros(num_rows, dtype=torch.bool, device=device)

    decoder = make_decoder(model, num_positions)
    logits = decoder.prefill(prompt_ids, per_prompt)
    alive = torch.arange(num_rows, device=device)  # the rows still in the decoder
    check_every = 1 if device.type == "cpu" else _CHECK_EVERY
    for position in range(num_positions):
        tokens, token_logp = sample_tokens(
            logits, uniforms[alive, position],
            temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p,
        )  # fmt: skip
        # A row that has ended stays until its whole group has; what it samples is dropped.
        running = ~terminated[alive]
        ids[alive, position] = tokens * running
        logp[alive, position] = token_logp * running
        ended = running & (tokens == end)
        lengths[alive] = torch.where(ended, position + 1, lengths[alive])
        terminated[alive] |= ended
        if watch_cache is not None and (position % _CHECK_EVERY == 0 or position + 1 == num_positions):
            watch_cache(position + 1, decoder.cache_bytes)
        if position + 1 == num_positions:
            break
        if (position + 1) % check_every == 0:
            unfinished = ~terminated[alive].view(-1, per_prompt).all(1)  # (groups,)
            if not bool(unfinished.all()):
                groups = unfinished.nonzero().squeeze(1)
                if len(groups) == 0:
                    break
                decoder.keep(groups)
                kept = unfinished.repeat_interleave(per_prompt)
                alive, tokens = alive[kept], tokens[kept]
        logits = decoder.step(tokens)
    return ids.cpu(), logp.cpu(), lengths.cpu(), terminated.cpu()


def _exact_dtype(model: PreTrainedModel) -> torch.dtype:
    """What log-probs are kept in: float32, or float64 for a float64 model."""
    return torch.promote_types(model.dtype, torch.float32)
