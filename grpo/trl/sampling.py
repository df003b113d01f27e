"""TRL's completions by our own decoder: prompts once a group, waiting groups where others have finished.

Where it gives the distribution that TRL's `generate` gives, it takes its place: temperature, top-k, top-p,
min-p, tokens that end a completion, tools turn by turn. A token is the inverse CDF at a uniform number of
its own, so that what a row says does not depend on how many are sampled at once.
"""

from collections.abc import Sequence
from itertools import groupby
from math import gcd
from typing import Any

import torch
from loguru import logger
from transformers import PreTrainedModel

from grpo.config.groups import SamplingSettings
from grpo.memory import Fit, Size
from grpo.model.load import context_length
from grpo.model.weights import RolloutModel
from grpo.rollout.decoder import ReusableArena, check_decoder, has_static_cache
from grpo.rollout.sample import sample_completions
from grpo.rollout.tokens import step_uniforms

_OURS = {
    "max_new_tokens", "do_sample", "pad_token_id", "bos_token_id", "eos_token_id", "temperature", "top_p",
    "top_k", "min_p",
}  # fmt: skip
"""Settings of generation that the decoder knows."""
_WITHOUT = {"repetition_penalty": 1.0, "cache_implementation": None}
"""Those that it does without, as TRL sets them unless told."""


def obstacle(trainer: Any, *, try_it: bool = True) -> str | None:
    """Why this trainer's completions are sampled by TRL itself; None where the decoder serves.

    try_it: whether the decoder is tried out, which takes weights.
    """
    model = base_model(trainer.accelerator.unwrap_model(trainer.model))
    settings = _OURS | {
        name for name, value in _WITHOUT.items() if trainer.generation_kwargs.get(name) == value
    }
    unknown = sorted(trainer.generation_kwargs.keys() - settings)
    if trainer.is_sharded:
        return "the model is sharded"
    if trainer.args.fp16:
        return "fp16"
    if trainer._is_vlm:
        return "the model takes images"
    if unknown:
        return f"generation with {', '.join(unknown)}"
    if not trainer.temperature > 0:
        return "greedy generation"
    if try_it and has_static_cache(model.config):
        check_decoder(model)  # which says so where it computes something else
    if not has_static_cache(model.config):
        return f"{type(model).__name__} does not decode over a static cache"
    return None


def sampling_settings(trainer: Any) -> SamplingSettings:
    """A trainer's, as the decoder takes them."""
    return SamplingSettings(
        max_new_tokens=trainer.max_completion_length, temperature=trainer.temperature,
        top_k=trainer.top_k or 0, top_p=1.0 if trainer.top_p is None else trainer.top_p,
        min_p=trainer.min_p or 0.0,
    )  # fmt: skip


class NativeSampler:
    """Of one trainer, whose `Fit` says how many rows are sampled at once."""

    def __init__(self, trainer: Any, fit: Fit) -> None:
        self._trainer, self._fit = trainer, fit
        self._arena = ReusableArena()
        self._sampler: RolloutModel | None = None
        self._drawn = 0, 0  # the step that was sampled for last, and how often
        self._has_told = False

    def has_room(self, prompt_ids: Sequence[Sequence[int]]) -> bool:
        """Whether the model's context holds these prompts and what may come; else a line says so, once."""
        model = base_model(self._trainer.accelerator.unwrap_model(self._trainer.model))
        room = context_length(model.config) - self._trainer.max_completion_length
        longest = max(map(len, prompt_ids))
        if longest > room and not self._has_told:
            self._has_told = True
            logger.info(
                "TRL samples by itself after a prompt of {} tokens: the context leaves {}", longest, room
            )
        return longest <= room

    def sample(self, prompt_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Tokens of a completion to each of N prompts; those that follow each other may be the same."""
        trainer = self._trainer
        self._next_draw()
        model = base_model(trainer.accelerator.unwrap_model(trainer.model_wrapped))
        was_training = model.training
        model.eval()  # in which no layer is recomputed, either
        try:
            with torch.no_grad():
                return self._sample(model, [list(ids) for ids in prompt_ids])
        finally:
            model.train(was_training)

    def _sample(self, model: PreTrainedModel, prompt_ids: list[list[int]]) -> list[list[int]]:
        trainer, size, longest = self._trainer, _group_size(prompt_ids), max(map(len, prompt_ids))
        settings = sampling_settings(trainer)
        model = self._in_step(model)
        uniforms = step_uniforms(
            len(prompt_ids), settings.max_new_tokens, seed=trainer.args.seed, step=self._drawn[0],
            draw=self._drawn[1] * trainer.accelerator.num_processes + trainer.accelerator.process_index,
        )  # (N, max_new_tokens)  # fmt: skip
        done: list[list[int]] = []

        def sample_part(rows: int) -> list[list[int]]:
            # At first so many rows alone, to see what they take; later all, those that wait for places too.
            count = rows if not self._fit.knows("sample") else len(prompt_ids)
            if in_group := len(done) % size:
                count = min(count, size - in_group)  # the rest of a group that has been split
            elif count > size:
                count -= count % size
            part = slice(len(done), len(done) + count)
            completions = sample_completions(
                model, trainer.processing_class, prompt_ids[part][::size], uniforms[part], settings,
                rows=rows, ends=_ends(trainer), reusable=self._arena,
            )  # fmt: skip
            pairs = zip(completions.ids.tolist(), completions.lengths.tolist(), strict=True)
            return [ids[:length] for ids, length in pairs]

        while len(done) < len(prompt_ids):
            done += self._fit.run(
                "sample", sample_part, Size(len(prompt_ids) - len(done), settings.max_new_tokens, longest),
                discard=self._arena.release, reused=lambda: self._arena.nbytes,
            )  # fmt: skip
        if trainer.accelerator.device.type != "cuda":  # where nothing is recorded
            self._arena.release()
        return done

    def _in_step(self, model: PreTrainedModel) -> PreTrainedModel:
        """The model as the sampler runs it: with bf16 a copy in it, which is what autocast multiplies by."""
        dtype = torch.bfloat16 if self._trainer.args.bf16 else model.dtype
        if self._sampler is None:
            self._sampler = RolloutModel(model, dtype)
        else:
            self._sampler.refresh()
        return self._sampler.model

    def _next_draw(self) -> None:
        """Each sampling of a step, of training or evaluation, has uniform numbers of its own."""
        step, times = self._drawn
        now = self._trainer.state.global_step
        self._drawn = now, times + 1 if step == now else 0


def _ends(trainer: Any) -> tuple[int, ...]:
    """Tokens any of which ends a completion, as TRL's own sampling is told; before 1.15 that was one."""
    ends = trainer.generation_kwargs["eos_token_id"]
    return (ends,) if isinstance(ends, int) else tuple(ends or ())


def base_model(model: Any) -> Any:
    """The model within peft's, which runs with its adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _group_size(prompt_ids: Sequence[Sequence[int]]) -> int:
    """How many rows of one prompt follow each other, everywhere a multiple of it."""
    return gcd(*(len(list(rows)) for _, rows in groupby(prompt_ids)))
