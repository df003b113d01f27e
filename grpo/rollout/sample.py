"""Sampling completions: prompts once for all of their rows, and rows that come and go."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from heapq import heappop, heappush, nsmallest
from itertools import count, islice
from typing import Any

import torch
from loguru import logger
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.config.groups import SamplingSettings
from grpo.data.tokens import tokenize
from grpo.distributed.shard import any_process, is_sharded, run_gathered
from grpo.errors import UserError
from grpo.model.load import context_length, end_tokens
from grpo.rollout.arena import Arena, Completions
from grpo.rollout.decoder import ArenaCache, open_arena, padded_prompt_length
from grpo.rollout.room import DecodeCapacity
from grpo.types import Batch, Prompt

_CHECK_EVERY = 8
"""Tokens between looks at the cache, and at who has finished on an accelerator, which waits for it."""


_MERGED_TOKENS = 4
"""Tokens before a text that may change how its first letter is written: a letter has up to four bytes."""


def tokenize_prompts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, *, longest: int
) -> list[list[int]]:
    """Token ids of each prompt. ValueError for an empty or too long one."""
    prompt_ids = tokenize(prompts, tokenizer)
    for prompt, ids in zip(prompts, prompt_ids, strict=True):
        if not ids:
            raise UserError(f"prompt {prompt.id} is empty: a prompt needs at least one token.")
        if len(ids) > longest:
            raise UserError(
                f"prompt {prompt.id} has {len(ids)} tokens, but the model's context leaves {longest} beside "
                "max_new_tokens: shorten the prompt, lower max_new_tokens, or choose another model."
            )
    return prompt_ids


def stop_length(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> int | None:
    """Returns how many of a text's tokens there are when its first stop text is complete; None without
    one."""

    def has_stopped(count: int) -> bool:
        text = tokenizer.decode(ids[:count])
        return any(stop in text for stop in stops)

    if not has_stopped(len(ids)):
        return None
    return 1 + bisect_left(range(1, len(ids)), True, key=has_stopped)


def begin_rollout(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    uniforms: Tensor,
    settings: SamplingSettings,
    *,
    ends: Sequence[int] | None = None,
    **options: Any,
) -> "Rollout":
    """Returns the rollout of prompts that are yet to be tokenized, see `Rollout` for the rest.

    ends: tokens any of which ends a completion; None: all that the model and its tokenizer name.
    """
    room = context_length(model.config) - settings.max_new_tokens
    prompt_ids = tokenize_prompts(prompts, tokenizer, longest=room)
    if ends is None:
        ends = () if settings.ignore_ends else end_tokens(model, tokenizer)
    return Rollout(model, tokenizer, prompt_ids, uniforms, settings, ends=ends, **options)


def rollout(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    uniforms: Tensor,
    settings: SamplingSettings,
    **options: Any,
) -> Batch:
    """Returns completions of all prompts, when the last has ended. options: see `begin_rollout`."""
    sampling = begin_rollout(model, tokenizer, prompts, uniforms, settings, **options)
    sampling.finish()
    return sampling.batch(prompts)


class Rollout:
    """Completions of prompts, sampled as they are asked for: iterating yields the rows that have ended.

    A row waits for a slot, decodes in it and leaves it; where pages run short, the rows that began last are
    given up, and wait again. They say the same the second time, as a token is a function of its seed, step,
    row and position: none of this changes what is sampled.
    """

    completions: Completions
    """On the CPU; of rows that have not ended, nothing."""
    kv_growth: list[tuple[int, int]]
    """(tokens, bytes of keys and values in use), every few tokens of the first rows."""
    tokens_given_up: int
    """That are sampled twice."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        prompt_ids: Sequence[Sequence[int]],
        uniforms: Tensor,
        settings: SamplingSettings,
        *,
        rows: int,
        ends: Sequence[int],
        cache_tokens: float | None = None,
        reusable: ArenaCache | None = None,
        stay_gathered: bool = False,
    ) -> None:
        """N = len(uniforms) completions, N / B of each prompt, at most `rows` at once.

        uniforms: (N, max_new_tokens), see `step_uniforms`. ends: tokens any of which ends a completion.
        cache_tokens: that rows at once are planned to hold of their own, on average; None: as many as they
        may get. reusable: where to find the arena of an earlier rollout of this model, and to leave it for
        the next. stay_gathered: gather all weights of a sharded model once, instead of each for every token.
        """
        self._model, self._tokenizer, self._settings = model, tokenizer, settings
        self._prompt_ids, self._uniforms = [list(ids) for ids in prompt_ids], uniforms
        self._group_size = len(uniforms) // len(prompt_ids)
        self._reusable, self._stay_gathered = reusable, stay_gathered
        prompt_tokens = padded_prompt_length(model.config, max(map(len, prompt_ids)), model.device.type)
        self._room = DecodeCapacity.of(
            min(rows, len(uniforms)),
            len(prompt_ids),
            self._group_size,
            prompt_tokens,
            settings.max_new_tokens,
            ends,
            cache_tokens=cache_tokens,
        )
        self.completions = Completions.empty(len(uniforms), settings.max_new_tokens, model, device="cpu")
        self.kv_growth, self.tokens_given_up, self._ended, self._is_stopped = [], 0, 0, False
        self._arena: Arena | None = None
        self._looked_at: Counter[int] = Counter()
        """By row, the tokens in which no stop text stands."""

    @property
    def share_done(self) -> float:
        """The share of all tokens that is done; a row that has ended has no more to come."""
        active = sum(slot.tokens for slot in self._arena.slots) if self._arena is not None else 0
        return (self._ended + active / self._settings.max_new_tokens) / len(self._uniforms)

    @property
    def share_given_up(self) -> float:
        """Tokens that were sampled twice, by all that there are."""
        return self.tokens_given_up / max(1, int(self.completions.lengths.sum()))

    def stop(self) -> None:
        """Leave rows as they are, most of them cut short: they are what is yielded next, and last."""
        self._is_stopped = True

    @torch.no_grad()
    def __iter__(self) -> Iterator[list[int]]:
        """Every few tokens (on a CPU every one) the rows that have ended since, by their numbers."""
        if is_sharded(self._model):  # all of it is one forward pass
            work = lambda: [row for rows in self._sample() for row in rows]  # noqa: E731
            yield run_gathered(self._model, work, stay_gathered=self._stay_gathered)
        else:
            yield from self._sample()

    def whole_groups(self) -> Iterator[list[int]]:
        """Every few tokens the groups of which the last row has ended since, by their numbers."""
        for rows in self:
            groups = dict.fromkeys(row // self._group_size for row in rows)
            yield [group for group in groups if not self._left[group]]

    def finish(self) -> Completions:
        """Returns all completions, once the last row has ended."""
        for _ in self:
            pass
        return self.completions

    def batch(self, prompts: Sequence[Prompt], groups: Sequence[int] | None = None) -> Batch:
        """Returns what these groups have sampled so far, None: all of them. prompts: the rollout's."""
        groups = range(len(self._prompt_ids)) if groups is None else groups
        rows = [group * self._group_size + row for group in groups for row in range(self._group_size)]
        ids, logp, lengths, terminated = (values[rows] for values in self.completions)
        written = [ids[:length] for ids, length in zip(ids.tolist(), lengths.tolist(), strict=True)]
        return Batch.of_rows(
            [prompts[group] for group in groups],
            [self._prompt_ids[group] for group in groups],
            ids,
            lengths,
            terminated=terminated,
            sampler_logp=logp,
            texts=self._tokenizer.batch_decode(written, skip_special_tokens=True),
        )

    def _sample(self) -> Iterator[list[int]]:
        arena = self._arena = open_arena(self._model, self._room, self._reusable)
        arena.reset(self._settings)
        self._waiting = list(range(len(self._uniforms)))  # a heap
        self._left = [self._group_size] * len(self._prompt_ids)
        self._held_back = any_active = False
        look_every = 1 if self._model.device.type == "cpu" else _CHECK_EVERY
        for step in count(0, look_every):
            if arena.supports_refill or not any_active:
                self._begin_rows(arena)
            arena.close_gaps()
            self._take_pages(arena, look_every)
            if step % _CHECK_EVERY == 0 and step <= self._settings.max_new_tokens:
                self.kv_growth.append((step + 1, arena.used_bytes))
            if self._settings.max_new_tokens > 1:
                for _ in range(look_every):
                    arena.decode_step()
            if self._is_stopped:
                yield self._leave(arena, range(len(arena.slots)))
                break
            if step % _CHECK_EVERY == 0:
                self._stop_texts(arena, range(len(arena.slots)))
            ended = arena.ended()
            self._stop_texts(arena, ended)
            yield self._leave(arena, ended)
            any_active = any_process(self._model, bool(arena.slots))
            if not any_active and not self._waiting:  # as many wait in all processes
                break
        self._arena = None
        if self.share_given_up:
            logger.info(
                "{:.1%} of tokens were sampled twice: texts are longer than they were planned for",
                self.share_given_up,
            )

    def _begin_rows(self, arena: Arena) -> None:
        """Waiting rows take free slots, and waiting prompts free places, together."""
        if not arena.supports_refill:  # none is left in any process, and what prompts there were is gone
            arena.reset(self._settings)
        while count := self._may_begin(arena):
            rows = {row: row // self._group_size for row in nsmallest(count, self._waiting)}
            if missing := [group for group in dict.fromkeys(rows.values()) if group not in arena.groups]:
                if arena.supports_refill:  # others that will be waited for, too
                    waiting = dict.fromkeys(row // self._group_size for row in sorted(self._waiting))
                    ahead = (group for group in waiting if group not in arena.groups)
                    missing = [*islice(ahead, min(arena.free_prompts, arena.prompts_at_once))]
                if missing:
                    arena.encode({group: self._prompt_ids[group] for group in missing})
                rows = {row: group for row, group in rows.items() if group in arena.groups}
            if not rows:
                return  # until a prompt's last row has ended
            for _ in rows:
                heappop(self._waiting)
            arena.begin(rows, self._uniforms[[*rows]])

    def _may_begin(self, arena: Arena) -> int:
        """How many rows may: once some were given up, as many as leave a page for a tenth of the others."""
        pages = arena.free_pages
        if self._held_back and arena.slots:
            pages -= 1 + len(arena.slots) // 10
        return max(0, min(len(self._waiting), arena.free_slots, pages))

    def _take_pages(self, arena: Arena, ahead: int) -> None:
        """Rows that need a page for the next tokens take one; if there are too few, rows are given up."""
        while lacking := [slot for slot in arena.slots if arena.lacks_page(slot, ahead)]:
            if len(lacking) <= arena.free_pages:
                arena.add_pages(lacking)
                continue
            self._held_back = True
            last = max(range(len(arena.slots)), key=lambda place: arena.slots[place].row)
            slot = arena.slots[last]
            self.tokens_given_up += slot.tokens
            self._looked_at.pop(slot.row, None)  # in 16 bits it may say something else
            arena.leave([last])
            heappush(self._waiting, slot.row)

    def _leave(self, arena: Arena, places: Collection[int]) -> list[int]:
        """Write what rows in these slots have sampled; the slots then are free."""
        if not places:
            return []
        slots = [arena.slots[place] for place in places]
        rows = [slot.row for slot in slots]
        for values, sampled in zip(self.completions, arena.sampled([*places]), strict=True):
            values[rows] = sampled.cpu()
        arena.leave(places)
        for slot in slots:
            self._left[slot.group] -= 1
        arena.forget({slot.group for slot in slots if not self._left[slot.group]})
        self._ended += len(rows)
        return rows

    def _stop_texts(self, arena: Arena, places: Sequence[int]) -> None:
        """End rows in which a stop text stands, after the token that completes the first."""
        if not self._settings.stop or not places:
            return
        stops, sampled = self._settings.stop_texts, arena.sampled(places)
        window = max(len(stop.encode()) for stop in stops) + _MERGED_TOKENS
        cut: dict[int, int] = {}
        for place, ids, length in zip(places, sampled.ids.tolist(), sampled.lengths.tolist(), strict=True):
            row = arena.slots[place].row
            looked_at = self._looked_at[row]
            if length <= looked_at:  # it had ended by then, or has been cut
                continue
            self._looked_at[row] = length
            # What was looked at before has no stop text: one that has come since ends among the new tokens.
            text = self._tokenizer.decode(ids[max(0, looked_at - window) : length])
            if any(stop in text for stop in stops):
                stopped_at = stop_length(ids[:length], self._tokenizer, stops)
                if stopped_at is not None:
                    cut[place] = stopped_at
        if cut:
            arena.cut([*cut], [*cut.values()])
