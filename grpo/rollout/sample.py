"""Sampling a step's completions: prompts once a group, and order plays no part.

A group that has finished leaves, or a waiting one takes its place. Rows do not leave one by one: those
of a group share their prompt's keys, and end within a few tokens of each other.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.config.groups import SamplingSettings
from grpo.data.tokens import tokenize
from grpo.distributed.shard import any_process, inside
from grpo.model.load import context_length, end_tokens
from grpo.rollout.cache import CacheBytes
from grpo.rollout.decoder import (
    has_static_cache,
    prompt_places,
    remaining_places,
    replaced_at_once,
)
from grpo.rollout.slots import KeptSlots, Slots
from grpo.types import Prompt, Rollout

_CHECK_EVERY = 8
"""Tokens between looks at the cache, and at who has finished on an accelerator, which waits for it."""


def tokenize_prompts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, *, longest: int
) -> list[list[int]]:
    """Token ids of each prompt. ValueError for an empty or too long one."""
    prompt_ids = tokenize(prompts, tokenizer)
    for prompt, ids in zip(prompts, prompt_ids, strict=True):
        if not ids:
            raise ValueError(f"prompt {prompt.id} is empty: a prompt needs at least one token.")
        if len(ids) > longest:
            raise ValueError(
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
    kept: KeptSlots | None = None,
    stay_gathered: bool = False,
    watch_cache: Callable[[int, CacheBytes], None] | None = None,
    watch_rows: Callable[[float], None] | None = None,
    stopped: Callable[[], bool] | None = None,
) -> Rollout:
    """Sample N = len(uniforms) completions, N / B of each prompt, at most `rows` at once.

    uniforms: (N, max_new_tokens), see `step_uniforms`. Whole groups are sampled together where
    `rows` allows, and a group is split where it does not; neither changes what is sampled.
    ends: tokens any of which ends a completion; None: all that the model and its tokenizer name.
    kept: where to find what an earlier rollout of this model has recorded, and to leave it for the next.
    stay_gathered: of a sharded model all weights at once, instead of a layer's for each token anew.
    watch_cache: told, every few steps, how many the first rows have done and what the cache takes up.
    watch_rows: told, as often, what share of all is done.
    stopped: asked after every token; once it says so, rows are left as they are, most of them cut short.
    """
    room = context_length(model.config) - settings.max_new_tokens
    prompt_ids = tokenize_prompts(prompts, tokenizer, longest=room)
    num_rows = len(uniforms)
    group_size = num_rows // len(prompts)
    if ends is None:
        ends = () if settings.ignore_ends else end_tokens(model, tokenizer)
    sampling = _Sampling(model, tokenizer, ends, prompt_ids, uniforms.to(model.device), settings, kept)
    sampling.watch_cache, sampling.watch_rows, sampling.stopped = watch_cache, watch_rows, stopped
    width = min(rows, group_size)  # rows of one group that decode together

    def work() -> None:
        for columns in torch.arange(group_size).split(width):
            rows_of = torch.arange(num_rows).view(-1, group_size)[:, columns].to(model.device)  # (B, width)
            sampling.sample(rows_of, groups_at_once=max(1, rows // width))
            sampling.watch_cache = None

    inside(model, work, stay_gathered=stay_gathered)
    lengths = sampling.lengths.cpu()
    longest = int(lengths.max())
    ids = sampling.ids[:, :longest].cpu()
    return Rollout(
        prompts=list(prompts),
        prompt_ids=prompt_ids,
        completion_ids=ids,
        lengths=lengths,
        terminated=sampling.terminated.cpu(),
        sampler_logp=sampling.logp[:, :longest].cpu(),
        completions=tokenizer.batch_decode(
            [row[:length] for row, length in zip(ids.tolist(), lengths.tolist(), strict=True)],
            skip_special_tokens=True,
        ),
    )


class _Sampling:
    """All N rows of a rollout, written as their groups end, and the groups that decode meanwhile."""

    watch_cache: Callable[[int, CacheBytes], None] | None = None
    watch_rows: Callable[[float], None] | None = None
    stopped: Callable[[], bool] | None = None

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        ends: Sequence[int],
        prompt_ids: list[list[int]],
        uniforms: Tensor,
        settings: SamplingSettings,
        kept: KeptSlots | None,
    ) -> None:
        self._model, self._ends, self._prompt_ids, self._uniforms = model, ends, prompt_ids, uniforms
        self._tokenizer, self._settings, self._kept = tokenizer, settings, kept
        num_rows, self._longest = uniforms.shape
        longest_prompt = max(map(len, prompt_ids))
        self._prompt_places = prompt_places(model.config, longest_prompt, model.device.type)
        # One column more: slots have it.
        self.ids = uniforms.new_zeros(num_rows, self._longest + 1, dtype=torch.long)
        exact = torch.promote_types(model.dtype, torch.float32)
        self.logp = uniforms.new_zeros(num_rows, self._longest + 1, dtype=exact)
        self.lengths = uniforms.new_zeros(num_rows, dtype=torch.long)
        self.terminated = uniforms.new_zeros(num_rows, dtype=torch.bool)

    def sample(self, rows_of: Tensor, *, groups_at_once: int) -> None:
        """Sample rows_of (B, width), the rows of each prompt, so many groups at once."""
        check_every = 1 if self._model.device.type == "cpu" else _CHECK_EVERY
        waiting = deque(range(len(self._prompt_ids)))
        while waiting:
            groups = [waiting.popleft() for _ in range(min(groups_at_once, len(waiting)))]
            slots = self._slots(len(groups), rows_of.shape[1])
            slots.start(
                self._prompts(groups), self._uniforms[rows_of[groups].flatten()],
                longest_prompt=self._prompt_places,
            )  # fmt: skip
            running: list[int | None] = [*groups]  # in each place
            for steps in count(1):
                if self.stopped is not None and self.stopped():
                    self._take(_in_use(running), slots, running, rows_of)
                    return
                longest = steps == self._longest
                looks = steps < self._longest and steps % _CHECK_EVERY == 1
                if self.watch_cache is not None and (looks or longest):
                    self.watch_cache(steps, slots.cache_bytes)
                if self.watch_rows is not None and looks:
                    self.watch_rows(self._share_done(slots, running))
                if steps % check_every == 0 or longest:
                    if steps % _CHECK_EVERY == 0 or longest:
                        self._stop(slots, _in_use(running))
                    self._take_ended(slots, running, rows_of)
                    if not any_process(self._model, any(group is not None for group in running)):
                        break
                running = self._fill(slots, running, waiting, rows_of)
                slots.advance()
            self.watch_cache = None  # it has seen the first rows

    def _slots(self, groups: int, width: int) -> Slots:
        def make() -> Slots:
            return Slots(self._model, groups, width, self._settings, ends=self._ends)

        if self._kept is None:
            return make()
        return self._kept.get((groups, width, self._prompt_places, self._settings), make)

    def _fill(
        self, slots: Slots, running: list[int | None], waiting: deque[int], rows_of: Tensor
    ) -> list[int | None]:
        """Waiting groups take the places of those that have ended, or the places are given up."""
        if waiting and has_static_cache(self._model):
            free = [place for place, group in enumerate(running) if group is None]
            at_once = replaced_at_once(len(running))
            if len(free) >= at_once:
                places = free[: min(len(waiting), at_once)]
                groups = [waiting.popleft() for _ in places]
                slots.replace(places, self._prompts(groups), self._uniforms[rows_of[groups].flatten()])
                for place, group in zip(places, groups, strict=True):
                    running[place] = group
            return running
        going_on = _in_use(running) or [0]
        remaining = len(going_on)
        if slots.is_recorded:
            remaining = remaining_places(len(running), len(going_on), rows_of.shape[1])
        if remaining == len(running):
            return running
        slots.keep(going_on, remaining)
        return [*(running[place] for place in going_on), *[None] * (remaining - len(going_on))]

    def _prompts(self, groups: Sequence[int]) -> list[list[int]]:
        return [self._prompt_ids[group] for group in groups]

    def _take_ended(self, slots: Slots, running: list[int | None], rows_of: Tensor) -> None:
        """Write what groups say that have ended since one last looked."""
        ended = [place for place, over in enumerate(slots.ended()) if over and running[place] is not None]
        if ended:
            self._stop(slots, ended)
            self._take(ended, slots, running, rows_of)

    def _take(self, taken: Sequence[int], slots: Slots, running: list[int | None], rows_of: Tensor) -> None:
        """Write what groups in these places say, which then are free."""
        rows = rows_of[[running[place] for place in taken]].flatten()
        places = slots.rows_of(taken)
        for name in ("ids", "logp", "lengths", "terminated"):
            getattr(self, name)[rows] = getattr(slots, name)[places]
        for place in taken:
            running[place] = None

    def _stop(self, slots: Slots, groups: Sequence[int]) -> None:
        """End rows in which a stop text stands, after the token that completes the first."""
        if not self._settings.stop or not groups:
            return
        rows = slots.rows_of(groups)
        stops = self._settings.stop_texts
        said = zip(rows.tolist(), slots.ids[rows].tolist(), slots.lengths[rows].tolist(), strict=True)
        cut: dict[int, int] = {}
        for row, ids, length in said:
            kept = stop_length(ids[:length], self._tokenizer, stops)
            if kept is not None:
                cut[row] = kept
        if cut:
            slots.cut([*cut], [*cut.values()])

    def _share_done(self, slots: Slots, running: list[int | None]) -> float:
        """Of all tokens that there may be; a row that has ended has no more to come."""
        places = slots.rows_of(_in_use(running))
        done = torch.where(slots.terminated, self._longest, slots.lengths)[places].sum().item()
        ended = int((self.lengths > 0).sum().item())
        return (ended + done / self._longest) / len(self.lengths)


def _in_use(running: Sequence[int | None]) -> list[int]:
    """Places that have a group."""
    return [place for place, group in enumerate(running) if group is not None]
