"""A phase at a size, on made-up tokens: for a warm-up, a plan for an absent card, find-max and benchmarks.

The code is that of training (prefill and decoding, the chunked head, the loss and its backward pass), on a
model that is there or on one without storage. Nothing is learned: gradients are dropped.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from transformers import PreTrainedModel

from grpo.config.groups import Checkpointing, LoraSettings, LossSettings, SamplingSettings
from grpo.distributed.shard import inside
from grpo.learning.loss import Tokens
from grpo.learning.objectives import learn_tokens
from grpo.memory import Size
from grpo.model.prefill import pad_prompts
from grpo.model.target import Target
from grpo.rollout.arena import Arena, Room
from grpo.rollout.decoder import open_arena, prompt_places, replaced_at_once
from grpo.scoring.micro_batches import MicroBatch, token_logprobs


@dataclass(frozen=True)
class PhaseSettings:
    """Everything but the size that the phases' memory depends on."""

    target: Target
    """Where the phases will run."""
    group_size: int
    sampling: SamplingSettings
    loss: LossSettings
    checkpointing: Checkpointing = "none"
    scores: Literal["nothing", "reference", "policy"] = "reference"
    """Whose log-probs are computed without learning, at most; autocast keeps the policy's cast weights."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    batch_rows: int = 0
    """Of a step: while fewer are sampled at once, others wait to take their places."""

    @property
    def phases(self) -> tuple[str, ...]:
        return ("sample", "learn") if self.scores == "nothing" else ("sample", "score", "learn")


class PhasesAt:
    """The phases of one pair of models. `reference`: what scores, without gradients."""

    def __init__(
        self,
        settings: PhaseSettings,
        policy: PreTrainedModel,
        sampler: PreTrainedModel,
        reference: Callable[[], AbstractContextManager[PreTrainedModel]] | None = None,
        *,
        hold_recording: Callable[[Arena], object] = Arena.advance,
    ) -> None:
        """hold_recording: a token more, and what its recording holds between its runs, if that is faked."""
        self.settings = settings
        self.policy, self._sampler = policy, sampler
        self._reference = reference or (lambda: nullcontext(policy))
        self._hold_recording = hold_recording
        self.trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]

    def run(self, phase: str, size: Size) -> None:
        """One pass. size: `tokens` are new ones, `shared` the prompt's. KeyError for an unknown phase."""
        {"sample": self.sample, "score": self.score, "learn": self.learn}[phase](size)

    @torch.no_grad()
    def sample(self, size: Size) -> None:
        """Prefill, the last token, when the cache is full, a group for another, and one that leaves."""
        inside(self._sampler, partial(self._decode, size))

    def _decode(self, size: Size) -> None:
        prompts, per_prompt = self._prompts(size)
        rows, tokens, device = len(prompts) * per_prompt, size.tokens, self._sampler.device
        others_wait = rows < self.settings.batch_rows
        made = (1 + others_wait) * rows, tokens + 1  # by a whole rollout
        written = torch.zeros(made, dtype=torch.long, device=device), torch.zeros(made, device=device)
        width = prompt_places(self._sampler.config, size.shared, self.settings.target.device.type)
        arena = open_arena(self._sampler, Room(len(prompts), per_prompt, width, tokens, ends=(0,)))
        arena.restart(self.settings.sampling, len(prompts))

        def fill(groups: int) -> None:
            uniforms = torch.zeros(groups * per_prompt, tokens, device=device)
            arena.fill({group: group for group in range(groups)}, prompts[:groups], uniforms)

        fill(len(prompts))
        arena.skip(max(0, tokens - 2))
        if tokens > 1:
            recording = self._hold_recording(arena)
            if others_wait and arena.joins and len(prompts) > 1:
                fill(replaced_at_once(len(prompts)))
            del recording
            if len(prompts) > 1:
                arena.groups[0] = None
                arena.compact()
        del written

    @torch.no_grad()
    def score(self, size: Size) -> None:
        """Log-probs of whole texts."""
        with self._reference() as model:
            token_logprobs(
                model, self._batch(size), temperature=self.settings.sampling.temperature,
                dtype=self.settings.target.dtype, traced=self.settings.target.device,
            )  # fmt: skip

    def learn(self, size: Size) -> None:
        """The loss and its backward pass, with gradients of a part before."""
        self.begin_gradients()
        settings, device, batch = self.settings, self.policy.device, self._batch(size)
        row = torch.arange(len(batch.rows), device=device).repeat_interleave(size.tokens)
        weight, advantage, sampler_logp, ref_logp = torch.zeros(4, len(row), device=device)
        tokens = Tokens(
            len(batch.rows), row, weight, advantage, sampler_logp,
            ref_logp=ref_logp if settings.loss.kl_coef else None,
        )  # fmt: skip
        learn_tokens(
            self.policy, batch, tokens, settings=settings.loss, dtype=settings.target.dtype,
            temperature=settings.sampling.temperature, checkpointing=settings.checkpointing,
            traced=settings.target.device,
        )  # fmt: skip
        self.forget()

    def begin_gradients(self) -> None:
        """As a part before leaves them."""
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter)

    def forget(self) -> None:
        """Drop gradients, of a pass that went well or of one that did not."""
        for parameter in self.trained:
            parameter.grad = None

    def _batch(self, size: Size) -> MicroBatch:
        prompts, per_prompt = self._prompts(size)
        rows = len(prompts) * per_prompt
        return MicroBatch(
            rows=torch.arange(rows),
            prompts=pad_prompts(prompts)._replace(is_padded=True),  # which takes more
            row_to_prompt=torch.arange(rows) // per_prompt,
            completion_ids=torch.zeros(rows, size.tokens, dtype=torch.long),
        )

    def _prompts(self, size: Size) -> tuple[list[list[int]], int]:
        """Prompts of equal length, and rows of each: whole groups, or part of one."""
        per_prompt = min(size.rows, self.settings.group_size)
        return [[0] * size.shared for _ in range(size.rows // per_prompt)], per_prompt
