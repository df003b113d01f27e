"""Sampling a step's completions: prompts once a group, and order plays no part.

A group that has finished leaves, or a waiting one takes its place. Rows do not leave one by one: those
of a group share their prompt's keys, and end within a few tokens of each other.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.config.groups import SamplingSettings
from grpo.data.tokens import tokenize
from grpo.distributed.shard import any_process, run_gathered
from grpo.errors import UserError
from grpo.model.load import context_length, end_tokens
from grpo.rollout.arena import Arena, Completions, Room
from grpo.rollout.decoder import ReusableArena, open_arena, prompt_places, replaced_at_once
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
    """Of a text's tokens, how many there are when the first stop text is complete; None where none is."""

    def has_stopped(count: int) -> bool:
        text = tokenizer.decode(ids[:count])
        return any(stop in text for stop in stops)

    if not has_stopped(len(ids)):
        return None
    return 1 + bisect_left(range(1, len(ids)), True, key=has_stopped)


@torch.no_grad()
def rollout(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    uniforms: Tensor,
    settings: SamplingSettings,
    *,
    rows: int,
    ends: Sequence[int] | None = None,
    reusable: ReusableArena | None = None,
    stay_gathered: bool = False,
    watch_cache: Callable[[int, int], object] | None = None,
    watch_rows: Callable[[float], None] | None = None,
    stopped: Callable[[], bool] | None = None,
) -> Batch:
    """Sample N = len(uniforms) completions, N / B of each prompt, at most `rows` at once.

    uniforms: (N, max_new_tokens), see `step_uniforms`. ends: tokens any of which ends a completion; None: all
    that the model and its tokenizer name. All else: see `sample_completions`.
    """
    room = context_length(model.config) - settings.max_new_tokens
    prompt_ids = tokenize_prompts(prompts, tokenizer, longest=room)
    if ends is None:
        ends = () if settings.ignore_ends else end_tokens(model, tokenizer)
    completion_ids, logp, lengths, terminated = sample_completions(
        model, tokenizer, prompt_ids, uniforms, settings,
        rows=rows, ends=ends, reusable=reusable, stay_gathered=stay_gathered, watch_cache=watch_cache,
        watch_rows=watch_rows, stopped=stopped,
    )  # fmt: skip
    rows_ids = [ids[:length] for ids, length in zip(completion_ids.tolist(), lengths.tolist(), strict=True)]
    return Batch.of_rows(
        prompts,
        prompt_ids,
        completion_ids,
        lengths,
        terminated=terminated,
        sampler_logp=logp,
        texts=tokenizer.batch_decode(rows_ids, skip_special_tokens=True),
    )


@torch.no_grad()
def sample_completions(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: list[list[int]],
    uniforms: Tensor,
    settings: SamplingSettings,
    *,
    rows: int,
    ends: Sequence[int],
    reusable: ReusableArena | None = None,
    stay_gathered: bool = False,
    watch_cache: Callable[[int, int], object] | None = None,
    watch_rows: Callable[[float], None] | None = None,
    stopped: Callable[[], bool] | None = None,
) -> Completions:
    """Tokens of N = len(uniforms) completions on the CPU, N / B of each prompt, at most `rows` at once.

    Whole groups are sampled together where `rows` allows, and a group is split where it does not; neither
    changes what is sampled.
    reusable: where to find the arena of an earlier rollout of this model, and to leave it for the next.
    stay_gathered: of a sharded model all weights at once, instead of a layer's for each token anew.
    watch_cache: told, every few steps, how many the first rows have done and the cache's bytes.
    watch_rows: told, as often, what share of all is done.
    stopped: asked after every token; once it says so, rows are left as they are, most of them cut short.
    """
    group_size = len(uniforms) // len(prompt_ids)
    sampling = _Sampling(
        tokenizer, prompt_ids, uniforms.to(model.device), settings,
        Completions.empty(len(uniforms), settings.max_new_tokens, model),
        watch_cache, watch_rows, stopped,
    )  # fmt: skip
    prompt_tokens = prompt_places(model.config, max(map(len, prompt_ids)), model.device.type)
    width = min(rows, group_size)

    def work() -> None:
        for column in range(0, group_size, width):  # rows of a group that decode together
            num_rows = min(width, group_size - column)
            num_groups = min(max(1, rows // num_rows), len(prompt_ids))
            room = Room(num_groups, num_rows, prompt_tokens, settings.max_new_tokens, tuple(ends))
            sampling.sample(open_arena(model, room, reusable), range(column, len(uniforms), group_size))

    run_gathered(model, work, stay_gathered=stay_gathered)
    return Completions(*(values.cpu() for values in sampling.completions))


@dataclass
class _Sampling:
    """All N rows of a rollout: groups are dealt to the places of an arena, and written as they end."""

    tokenizer: PreTrainedTokenizerBase
    prompt_ids: list[list[int]]
    uniforms: Tensor
    settings: SamplingSettings
    completions: Completions
    watch_cache: Callable[[int, int], object] | None
    watch_rows: Callable[[float], None] | None
    stopped: Callable[[], bool] | None
    looked_at: Counter[int] = field(default_factory=Counter)
    """By row, the tokens in which no stop text stands."""

    def sample(self, arena: Arena, groups: Iterable[int]) -> None:
        """Sample groups, by their first rows, as many at once as there are places."""
        longest, waiting = self.settings.max_new_tokens, deque(groups)
        check_every = 1 if self.uniforms.device.type == "cpu" else _CHECK_EVERY
        while waiting:
            num_groups = min(arena.room.groups, len(waiting))
            arena.restart(self.settings, num_groups)
            self._fill(arena, range(num_groups), waiting)
            for steps in count(1):
                if self.stopped is not None and self.stopped():
                    self._take(arena, arena.in_use)
                    return
                self._watch(arena, steps)
                if steps % check_every == 0 or steps == longest:
                    if steps % _CHECK_EVERY == 0 or steps == longest:
                        self._stop(arena, arena.in_use)
                    ended = arena.ended()
                    self._stop(arena, ended)
                    self._take(arena, ended)
                    if not any_process(arena.model, bool(arena.in_use)):
                        break
                free = [place for place, group in enumerate(arena.groups) if group is None]
                at_once = replaced_at_once(len(arena.groups))
                if not (waiting and arena.joins):
                    arena.compact()
                elif len(free) >= at_once:
                    self._fill(arena, free[:at_once], waiting)
                arena.advance()
            self.watch_cache = None  # it has seen the first rows

    def _fill(self, arena: Arena, places: Iterable[int], waiting: deque[int]) -> None:
        """Waiting groups take free places, and have their first tokens."""
        groups = {place: waiting.popleft() for place in places if waiting}
        group_size = len(self.uniforms) // len(self.prompt_ids)
        prompt_ids = [self.prompt_ids[first // group_size] for first in groups.values()]
        uniforms = [self.uniforms[first : first + arena.room.width] for first in groups.values()]
        arena.fill(groups, prompt_ids, torch.cat(uniforms))

    def _take(self, arena: Arena, places: Sequence[int]) -> None:
        """Write what groups in these places have sampled; the places then are free."""
        for place in places:
            first = arena.groups[place]
            assert first is not None
            for values, sampled in zip(self.completions, arena.rows([place]), strict=True):
                values[first : first + arena.room.width] = sampled
            arena.groups[place] = None

    def _stop(self, arena: Arena, places: Sequence[int]) -> None:
        """End rows in which a stop text stands, after the token that completes the first."""
        if not self.settings.stop or not places:
            return
        stops, sampled = self.settings.stop_texts, arena.rows(places)
        window = max(len(stop.encode()) for stop in stops) + _MERGED_TOKENS
        cut: dict[int, int] = {}
        firsts = [arena.groups[place] for place in places]
        numbers = [first + row for first in firsts if first is not None for row in range(arena.room.width)]
        rows = (tensor.tolist() for tensor in (arena.rows_of(places), sampled.ids, sampled.lengths))
        for number, row, ids, length in zip(numbers, *rows, strict=True):
            looked_at = self.looked_at[number]
            if length <= looked_at:  # it had ended by then, or has been cut
                continue
            self.looked_at[number] = length
            # What was looked at before has no stop text: one that has come since ends among the new tokens.
            text = self.tokenizer.decode(ids[max(0, looked_at - window) : length])
            if any(stop in text for stop in stops):
                stopped_at = stop_length(ids[:length], self.tokenizer, stops)
                if stopped_at is not None:
                    cut[row] = stopped_at
        if cut:
            arena.cut([*cut], [*cut.values()])

    def _watch(self, arena: Arena, steps: int) -> None:
        longest = self.settings.max_new_tokens
        if steps % _CHECK_EVERY != 1 and steps != longest:
            return
        if self.watch_cache is not None and steps <= longest:
            self.watch_cache(steps, arena.cache_bytes)
        if self.watch_rows is not None:
            sampled = arena.rows(arena.in_use)  # a row that has ended has no more to come
            done = torch.where(sampled.terminated, longest, sampled.lengths).sum() / longest
            ended = (self.completions.lengths > 0).sum()
            self.watch_rows(float((ended + done) / len(self.uniforms)))
