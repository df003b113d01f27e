"""TRL's completions by our own decoder: prompts once a group, waiting groups where others have finished.

Where it gives the distribution that TRL's `generate` gives, it takes its place: temperature, top-k, top-p,
min-p, tokens that end a completion, tools turn by turn. A token is the inverse CDF at a uniform number of
its own, so that what a row says does not depend on how many are sampled at once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from math import gcd
from typing import Any

import torch
from loguru import logger
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from grpo.config.groups import SamplingSettings
from grpo.memory import Fit, PassSize, is_out_of_memory
from grpo.model.load import context_length
from grpo.model.weights import RolloutModel
from grpo.rollout.decoder import ArenaCache, choose_decoder
from grpo.rollout.lengths import CachePlan
from grpo.rollout.sample import Rollout
from grpo.rollout.tokens import step_uniforms

_HONOURED = {
    "max_new_tokens",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "eos_token_id",
}
"""Settings of `generate` that the decoder samples by."""
_WITHOUT_EFFECT = {
    "max_length",
    "pad_token_id",
    "bos_token_id",
    "use_cache",
    "disable_compile",
    "compile_config",
    "_from_model_config",
    "transformers_version",
}
"""Settings that change no token of a completion; `max_length` counts only where there is no
`max_new_tokens`, which TRL always gives.
"""
_NEUTRAL = {"min_new_tokens": 0, "guidance_scale": 1.0}
"""Values that do nothing and are no defaults."""
_RUN_IN_PLACE = {"LORA", "GLORA", "ROAD", "ADALORA"}
"""Adapters with a forward pass or hooks of their own which do nothing for a plain text."""


class NotNative(Exception):
    """The reason why TRL samples completions by itself."""


@dataclass(frozen=True)
class Generation:
    """How completions are sampled."""

    settings: SamplingSettings
    ends: tuple[int, ...]
    """Tokens any of which ends a completion."""


def why_not_native(trainer: Any, *, try_it: bool = True) -> str | None:
    """Why this trainer's completions are sampled by TRL itself; None where the decoder serves.

    try_it: whether the decoder is tried out, which takes weights.
    """
    try:
        _check_trainer(trainer)
        generation_of(trainer)
        model = base_model(trainer.accelerator.unwrap_model(trainer.model))
        if try_it and (wrong := choose_decoder(model)):
            raise NotNative(wrong)
    except NotNative as reason:
        return str(reason)
    return None


def _check_trainer(trainer: Any) -> None:
    """NotNative for a trainer whose model the decoder cannot run as TRL does."""
    if trainer.is_sharded:
        raise NotNative("the model is sharded")
    if trainer.args.fp16:
        raise NotNative("fp16")
    if trainer._is_vlm:
        raise NotNative("the model takes images")
    if reason := why_peft_must_run(trainer.accelerator.unwrap_model(trainer.model)):
        raise NotNative(reason)


def why_peft_must_run(model: Any) -> str | None:
    """Why a model's adapters act only in peft's own forward pass; None where they act in the model's layers.

    Prompt tuning puts tokens before each text, aLoRA looks for tokens in it, X-LoRA and Poly choose among
    adapters by text or task: the model within peft's would run without all of that.
    """
    for config in getattr(model, "peft_config", {}).values():
        name = str(getattr(config.peft_type, "value", config.peft_type))
        if config.is_prompt_learning:
            return f"peft puts tokens of its own before each text ({name})"
        if getattr(config, "alora_invocation_tokens", None):
            return "aLoRA's adapters begin where peft finds their tokens in a text"
        tuner = type(getattr(model, "base_model", None))
        own = {"forward", "generate", "_enable_peft_forward_hooks"} & vars(tuner).keys()
        if own and name not in _RUN_IN_PLACE and tuner.__module__.startswith("peft."):
            return f"peft runs {name} adapters by itself"
    return None


def generation_of(trainer: Any) -> Generation:
    """How TRL's `generate` would sample now, wherever that is set; NotNative where the decoder cannot.

    It goes by the values that `generate` would have in the end: those of GRPOConfig and its
    generation_kwargs, then of the model's own generation configuration, then transformers' defaults.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    inner = base_model(model)
    if "generate" in {**vars(model), **vars(inner)} or type(inner).generate is not GenerationMixin.generate:
        raise NotNative("the model has a generate of its own")
    inner.generation_config = model.generation_config  # as peft has it when it generates
    config, _ = inner._prepare_generation_config(trainer.generation_config)
    others = [name for name in _generation_defaults() if name not in _HONOURED | _WITHOUT_EFFECT]
    if unknown := [name for name in others if not _does_nothing(name, getattr(config, name, None))]:
        raise NotNative(f"generation with {', '.join(sorted(unknown))}")
    ends = (config.eos_token_id,) if isinstance(config.eos_token_id, int) else config.eos_token_id or ()
    cut_at = getattr(trainer, "eos_token_ids", None) or [trainer.eos_token_id]
    if {*ends} != {*cut_at}:  # then TRL goes on behind the end of a row
        raise NotNative(f"generation ends at {sorted(ends)}, and completions at {sorted(cut_at)}")
    if config.do_sample and not config.temperature > 0:
        raise NotNative(f"sampling at temperature {config.temperature}")
    try:
        settings = SamplingSettings(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature if config.do_sample else 0.0,
            top_k=config.top_k or 0,
            top_p=1.0 if config.top_p is None else config.top_p,
            min_p=config.min_p or 0.0,
        )
    except (ValueError, TypeError) as error:  # what `generate` may take, or refuses in words of its own
        raise NotNative(str(error)) from error
    return Generation(settings, tuple(ends))


@cache
def _generation_defaults() -> dict[str, Any]:
    """All settings that transformers' `generate` knows, with the values that it has where nobody sets one."""
    return {**vars(GenerationConfig()), **GenerationConfig._get_default_generation_params()}


def _does_nothing(name: str, value: Any) -> bool:
    if value is None or value is False or (isinstance(value, list | dict) and not value):
        return True
    return value in (_generation_defaults()[name], _NEUTRAL.get(name))


def longest_completion(trainer: Any) -> int:
    """Tokens of a completion at most: generation_kwargs may name another number than GRPOConfig."""
    config = getattr(trainer, "generation_config", None)  # not there where vLLM samples
    return getattr(config, "max_new_tokens", None) or trainer.max_completion_length


def say_trl_samples(reason: str) -> None:
    logger.info("TRL samples completions by itself, without sharing prompts: {}", reason)


class NativeSampler:
    """Samples one trainer's completions, as many rows at once as its `Fit` says."""

    def __init__(self, trainer: Any, fit: Fit) -> None:
        self._trainer, self._fit = trainer, fit
        self._arena = ArenaCache()
        fit.keeps("sample", self._arena)
        self._sampler: RolloutModel | None = None
        self._drawn = 0, 0  # the step that was sampled for last, and how often
        self._reasons = set[str]()  # that have been logged
        self._wrong: str | None = None  # of the policy's copy, once it has been made
        self._cache_plan = CachePlan(longest_completion(trainer))
        self._generation: Generation

    def takes(self, prompt_ids: Sequence[Sequence[int]]) -> bool:
        """Whether completions to these prompts are sampled here; else a line says why, once.

        Settings are read anew each time: a callback may change a temperature, or switch adapters.
        """
        try:
            _check_trainer(self._trainer)
            self._generation = generation_of(self._trainer)
            self._check_room(prompt_ids)
            with self._evaluating():
                self._update_copy()
        except NotNative as error:
            if (reason := str(error)) not in self._reasons:
                self._reasons.add(reason)
                say_trl_samples(reason)
            return False
        return True

    def _check_room(self, prompt_ids: Sequence[Sequence[int]]) -> None:
        """NotNative where the model's context does not hold these prompts and what may come."""
        room = context_length(self._policy.config) - self._generation.settings.max_new_tokens
        longest = max(map(len, prompt_ids))
        if longest > room:
            raise NotNative(f"after a prompt of {longest} tokens the context leaves no room, {room} fit")

    def _update_copy(self) -> None:
        """Have the sampler's copy be what the policy is now, in bf16 where TRL multiplies in it.

        NotNative where the copy turns out to be another model.
        """
        if self._sampler is not None and not self._sampler.is_outdated():
            self._sampler.refresh()
            return
        if self._wrong is not None:
            raise NotNative(self._wrong)
        self._arena.release()
        self._sampler = None  # before there is another
        policy = self._policy
        dtype = torch.bfloat16 if self._trainer.args.bf16 else policy.dtype
        sampler = RolloutModel(policy, dtype)
        try:
            wrong = sampler.check()
        except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            wrong = f"a copy of it in {dtype} does not run: {error}".splitlines()[0]
        if wrong is not None:
            self._wrong = wrong
            raise NotNative(wrong)
        self._sampler = sampler

    @property
    def _policy(self) -> PreTrainedModel:
        return base_model(self._trainer.accelerator.unwrap_model(self._trainer.model_wrapped))

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Inside, neither dropout nor recomputed layers, and no gradients."""
        policy = self._policy
        was_training = policy.training
        policy.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            policy.train(was_training)

    def sample(self, prompt_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """Tokens of a completion to each of N prompts that it `takes`; equal ones follow each other."""
        self._next_draw()
        with self._evaluating():
            return self._sample([list(ids) for ids in prompt_ids])

    def _sample(self, prompt_ids: list[list[int]]) -> list[list[int]]:
        trainer, size, longest = self._trainer, _group_size(prompt_ids), max(map(len, prompt_ids))
        settings, ends = self._generation.settings, self._generation.ends
        assert self._sampler is not None
        model = self._sampler.model.eval()
        uniforms = step_uniforms(
            len(prompt_ids),
            settings.max_new_tokens,
            seed=trainer.args.seed,
            step=self._drawn[0],
            draw=self._drawn[1] * trainer.accelerator.num_processes + trainer.accelerator.process_index,
        )  # (N, max_new_tokens)
        done: list[list[int]] = []
        if self._cache_plan.new_tokens != settings.max_new_tokens:  # which a callback may change
            self._cache_plan = CachePlan(settings.max_new_tokens)
        plan = self._cache_plan

        def sample_part(rows: int) -> list[list[int]]:
            # At first so many rows alone, to see what they take; later all, those that wait for places too.
            count = rows if not self._fit.knows("sample") else len(prompt_ids)
            if in_group := len(done) % size:
                count = min(count, size - in_group)  # the rest of a group that has been split
            elif count > size:
                count -= count % size
            part = slice(len(done), len(done) + count)
            completions = Rollout(
                model,
                trainer.processing_class,
                prompt_ids[part][::size],
                uniforms[part],
                settings,
                rows=rows,
                ends=ends,
                reusable=self._arena,
                cache_tokens=plan.tokens,
            ).finish()
            pairs = zip(completions.ids.tolist(), completions.lengths.tolist(), strict=True)
            return [ids[:length] for ids, length in pairs]

        def took(rows: int, new: list[list[int]]) -> PassSize:
            return PassSize(min(rows, len(new)), int(plan.tokens), longest, batch_rows=len(new))

        while len(done) < len(prompt_ids):
            sampled = self._fit.run(
                "sample",
                sample_part,
                PassSize(left := len(prompt_ids) - len(done), int(plan.tokens), longest, batch_rows=left),
                took=took,
                rollback=self._arena.release,
            )
            done += sampled
        rows = self._fit.planned().get("sample", len(done))
        if why := plan.see([*map(len, done)], rows):
            self._fit.reopen("sample", why)
        if trainer.accelerator.device.type != "cuda":  # where nothing is recorded
            self._arena.release()
        return done

    def _next_draw(self) -> None:
        """Each sampling of a step, of training or evaluation, has uniform numbers of its own."""
        step, times = self._drawn
        now = self._trainer.state.global_step
        self._drawn = now, times + 1 if step == now else 0


def base_model(model: Any) -> Any:
    """The model within peft's, which runs with its adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _group_size(prompt_ids: Sequence[Sequence[int]]) -> int:
    """How many rows of one prompt follow each other, everywhere a multiple of it."""
    return gcd(*(len(list(rows)) for _, rows in groupby(prompt_ids)))
