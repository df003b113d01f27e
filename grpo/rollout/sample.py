"""Sampling a step's completions: prompts once a group, and order plays no part.

A group that has finished leaves, or a waiting one takes its place. Rows do not leave one by one: those
of a group share their prompt's keys, and end within a few tokens of each other.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.config.groups import SamplingSettings
from grpo.distributed.shard import any_process, inside
from grpo.model.load import context_length
from grpo.rollout.decoder import CacheBytes, has_static_cache, leave_at_once, make_decoder, replaced_at_once
from grpo.rollout.tokens import sample_tokens
from grpo.types import Prompt, Rollout

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
    watch_rows: Callable[[float], None] | None = None,
) -> Rollout:
    """Sample N = len(uniforms) completions, N / B of each prompt, at most `rows` at once.

    uniforms: (N, max_new_tokens), see `step_uniforms`. Whole groups are sampled together where
    `rows` allows, and a group is split where it does not; neither changes what is sampled.
    watch_cache: told, every few steps, how many the first rows have done and what the cache takes up.
    watch_rows: told, as often, what share of all is done.
    """
    room = context_length(model.config) - settings.max_new_tokens
    prompt_ids = tokenize_prompts(prompts, tokenizer, longest=room)
    num_rows = len(uniforms)
    group_size = num_rows // len(prompts)
    made = _Completions(uniforms.to(model.device), _exact_dtype(model), end=tokenizer.eos_token_id)
    width = min(rows, group_size)  # rows of one group that decode together

    def work() -> None:
        watch = watch_cache
        for columns in torch.arange(group_size).split(width):
            rows_of = torch.arange(num_rows).view(-1, group_size)[:, columns].to(model.device)  # (B, width)
            _sample(
                model, prompt_ids, rows_of, made, settings,
                groups_at_once=max(1, rows // width), watch_cache=watch, watch_rows=watch_rows,
            )  # fmt: skip
            watch = None

    inside(model, work)
    lengths = made.lengths.cpu()
    longest = int(lengths.max())
    ids = made.ids[:, :longest].cpu()
    return Rollout(
        prompts=list(prompts),
        prompt_ids=prompt_ids,
        completion_ids=ids,
        lengths=lengths,
        terminated=made.terminated.cpu(),
        sampler_logp=made.logp[:, :longest].cpu(),
        completions=tokenizer.batch_decode(
            [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)],
            skip_special_tokens=True,
        ),
    )


class _Completions:
    """N rows of at most T tokens, written as they are sampled."""

    def __init__(self, uniforms: Tensor, dtype: torch.dtype, *, end: int) -> None:
        num_rows, self._longest = uniforms.shape
        self._uniforms, self._end = uniforms, end
        # One column more: it takes what a row samples that has ended and runs on with its group.
        self.ids = uniforms.new_zeros(num_rows, self._longest + 1, dtype=torch.long)
        self.logp = uniforms.new_zeros(num_rows, self._longest + 1, dtype=dtype)
        self.lengths = uniforms.new_zeros(num_rows, dtype=torch.long)
        self.terminated = uniforms.new_zeros(num_rows, dtype=torch.bool)

    def next_uniforms(self, rows: Tensor) -> Tensor:
        return self._uniforms[rows, self.lengths[rows].clamp(max=self._longest - 1)]

    def add(self, rows: Tensor, tokens: Tensor, logp: Tensor) -> None:
        """One token more for each of these rows (R,) that has not ended."""
        lengths, terminated = self.lengths[rows], self.terminated[rows]
        running = ~terminated & (lengths < self._longest)
        position = torch.where(running, lengths, self._longest)
        self.ids[rows, position] = tokens * running
        self.logp[rows, position] = logp * running
        self.lengths[rows] = lengths + running
        self.terminated[rows] = terminated | (running & (tokens == self._end))

    def share_done(self) -> float:
        """Of all tokens that there may be; a row that has ended has no more to come."""
        return (
            torch.where(self.terminated, self._longest, self.lengths).double().mean().item() / self._longest
        )

    def ended(self, rows: Tensor) -> Tensor:
        return self.terminated[rows] | (self.lengths[rows] == self._longest)


def _sample(
    model: PreTrainedModel,
    prompt_ids: list[list[int]],
    rows_of: Tensor,
    made: _Completions,
    settings: SamplingSettings,
    *,
    groups_at_once: int,
    watch_cache: Callable[[int, CacheBytes], None] | None,
    watch_rows: Callable[[float], None] | None,
) -> None:
    """Sample rows_of (B, width), the rows of each prompt, so many groups at once."""
    width = rows_of.shape[1]
    longest_prompt = max(map(len, prompt_ids))
    check_every = 1 if model.device.type == "cpu" else _CHECK_EVERY
    waiting = deque(range(len(prompt_ids)))
    while waiting:
        groups = [waiting.popleft() for _ in range(min(groups_at_once, len(waiting)))]
        alive = rows_of[groups]  # (groups, width): the rows in the decoder
        decoder = make_decoder(model, settings.max_new_tokens)
        logits = decoder.prefill(
            [prompt_ids[group] for group in groups], width, longest_prompt=longest_prompt
        )
        for steps in count(1):
            tokens, logp = sample_tokens(
                logits, made.next_uniforms(alive.flatten()),
                temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p,
            )  # fmt: skip
            made.add(alive.flatten(), tokens, logp)
            longest = steps == settings.max_new_tokens
            looks = steps < settings.max_new_tokens and steps % _CHECK_EVERY == 1
            if watch_cache is not None and (looks or longest):
                watch_cache(steps, decoder.cache_bytes)
            if watch_rows is not None and looks:
                watch_rows(made.share_done())

            ended: list[int] = []
            if steps % check_every == 0 or longest:
                ended = made.ended(alive).all(1).nonzero().flatten().tolist()
                if not any_process(model, len(ended) < len(alive)):
                    break
            others_come = waiting and has_static_cache(model)
            if not others_come and len(ended) >= leave_at_once(model, len(alive)):
                kept = [place for place in range(len(alive)) if place not in ended] or [0]
                decoder.keep(kept)
                alive, tokens = alive[kept], tokens.view(alive.shape)[kept].flatten()
            logits = decoder.step(tokens)
            if others_come and len(ended) >= replaced_at_once(len(alive)):
                places = ended[: min(len(waiting), replaced_at_once(len(alive)))]
                groups = [waiting.popleft() for _ in places]
                alive[places] = rows_of[groups]
                first = decoder.replace(places, [prompt_ids[group] for group in groups])
                logits.view(*alive.shape, -1)[places] = first.view(len(places), width, -1)
        watch_cache = None  # it has seen the first rows


def _exact_dtype(model: PreTrainedModel) -> torch.dtype:
    """What log-probs are kept in: float32, or float64 for a float64 model."""
    return torch.promote_types(model.dtype, torch.float32)
