"""A phase at a size, on made-up tokens: for a warm-up, a plan for an absent card, find-max and benchmarks.

The code is that of training (prefill and decoding, the chunked head, the loss and its backward pass), on a
model that is there or on one without storage. Nothing is learned: gradients are dropped.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel

from grpo.config.groups import SamplingSettings
from grpo.distributed.shard import run_gathered
from grpo.learning.loss import StepCounts
from grpo.learning.masters import master_bytes, master_dtype
from grpo.learning.objectives import accumulate_streams
from grpo.learning.optimizer import moment_bytes
from grpo.memory import PassSize
from grpo.model.weights import reference_bytes
from grpo.plan.workload import Workload
from grpo.rollout.arena import Arena, Completions
from grpo.rollout.decoder import has_static_cache, open_arena, padded_prompt_length
from grpo.rollout.room import DecodeCapacity
from grpo.rollout.static_cache import cache_dtype, page_tokens
from grpo.scoring.head import logit_bytes, tokens_at_once
from grpo.scoring.logprobs import score_streams
from grpo.scoring.stream import Stream, make_stream
from grpo.types import Batch, Prompt


class PhaseProbe:
    """The phases of one pair of models. `reference`: what scores, without gradients."""

    def __init__(
        self,
        work: Workload,
        policy: PreTrainedModel,
        sampler: PreTrainedModel,
        reference: Callable[[], AbstractContextManager[PreTrainedModel]] | None = None,
        *,
        hold_recording: Callable[[Arena], object] = Arena.decode_step,
    ) -> None:
        """hold_recording: a token more, and what its recording holds between its runs, if that is faked."""
        self.work = work
        self.policy, self._sampler = policy, sampler
        self._reference = reference or (lambda: nullcontext(policy))
        self._hold_recording = hold_recording
        self.trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self.trained_sizes = [parameter.numel() for parameter in self.trained]

    def run(self, phase: str, size: PassSize) -> None:
        """Makes one pass of this size. KeyError for an unknown phase."""
        {"sample": self.sample, "score": self.score, "learn": self.learn}[phase](size)

    def resident(self) -> dict[str, int]:
        """Bytes that exist between phases: weights, AdamW's two moments, and copies beside them.

        Of adapters the base is there once, and serves the sampler and the reference, too; of a sharded model
        each process holds its part.
        """
        config, target, shards = self.work.config, self.work.target, self.work.shards
        exact, sizes = target.master_dtype.itemsize, [-(-size // shards) for size in self.trained_sizes]
        parts = {
            "weights": -(-sum(parameter.nbytes for parameter in self.policy.parameters()) // shards),
            "optimizer": moment_bytes(sizes, config, exact),
        }
        # Of masters whose upper half is the model's weight the optimizer holds the lower.
        parts["optimizer"] += sum(master_bytes(p) - p.nbytes for p in self.policy.parameters())
        if config.uses_lora and config.reference_sync:
            parts["reference"] = exact * sum(sizes)
        elif config.uses_reference and self.work.reference_here and not config.uses_lora:
            whole = shards > 1  # which is sharded as it is
            parts["reference"] = parts["weights"] if whole else reference_bytes(self.policy, target.dtype)
        there = {*map(id, self.policy.parameters())}
        if copies := sum(copy.nbytes for copy in self._sampler.parameters() if id(copy) not in there):
            parts["sampler's copy"] = copies
        return parts

    def known_parts(self, phase: str, size: PassSize) -> dict[str, int]:
        """Returns those of a phase's bytes that have a closed form, as upper bounds."""
        target, model = self.work.target, self.work.target.model_config
        exact = torch.promote_types(target.dtype, torch.float32)
        logit_dtype = exact if self.work.config.fp32_logits else target.dtype
        if phase == "sample":
            room = self._room(model, size)
            tokens = room.prompts * room.prompt_tokens + room.pages * room.page
            if not has_static_cache(model):
                tokens = size.rows * (size.prompt_tokens + size.completion_tokens)
            return {
                "KV cache": tokens * kv_bytes_per_token(model, cache_dtype(target.dtype, target.device.type)),
                "logits": size.rows * target.vocab_size * (4 + logit_dtype.itemsize),
            }
        at_once = tokens_at_once(target.vocab_size, logit_dtype, target.device.type)
        numbers = min(size.rows * size.completion_tokens, at_once) * target.vocab_size
        parts = {"logits": numbers * logit_bytes(logit_dtype, target.device.type, entropy=phase == "learn")}
        if phase == "learn":
            parts["gradients"] = target.master_dtype.itemsize * -(
                -sum(self.trained_sizes) // self.work.shards
            )
        return parts

    @torch.no_grad()
    def sample(self, size: PassSize) -> None:
        """Encodes prompts, adds the last token when the cache is full, and encodes prompts of rows that wait.

        size: its `completion_tokens` are those that rows hold in the cache, on average.
        """
        run_gathered(self._sampler, partial(self._decode, size))

    def _room(self, model: PretrainedConfig, size: PassSize) -> DecodeCapacity:
        """Returns what a rollout has room for that is planned for this size."""
        config, device_type = self.work.config, self.work.target.device.type
        longest, prompts = config.max_new_tokens, -(-size.rows // config.group_size)
        if not page_tokens(longest) <= size.completion_tokens <= longest:
            longest = size.completion_tokens  # of no part of what texts may take
        if size.rows < size.batch_rows:
            prompts = -(-size.batch_rows // config.group_size)
        width = padded_prompt_length(model, size.prompt_tokens, device_type)
        return DecodeCapacity.of(
            size.rows,
            prompts,
            config.group_size,
            width,
            longest,
            ends=(0,),
            cache_tokens=size.completion_tokens,
        )

    def _decode(self, size: PassSize) -> None:
        prompts, per_prompt = self._prompts(size)
        room, device_type = self._room(self._sampler.config, size), self.work.target.device.type
        rows, tokens = len(prompts) * per_prompt, room.pages // size.rows * room.page
        made = max(rows, size.batch_rows) if device_type == "cpu" else 0  # by a whole rollout
        written = Completions.empty(made, room.new_tokens, self._sampler)
        arena = open_arena(self._sampler, room, device_type=device_type)
        arena.reset(SamplingSettings.of(self.work.config, max_new_tokens=room.new_tokens))
        arena.encode(dict(enumerate(prompts)))
        uniforms = torch.zeros(rows, room.new_tokens, device=self._sampler.device)
        arena.begin({row: row // per_prompt for row in range(rows)}, uniforms)
        tokens = min(tokens, room.new_tokens)
        arena.skip(max(0, tokens - 2))
        while lacking := [slot for slot in arena.slots if arena.lacks_page(slot, 1)]:
            arena.add_pages(lacking)
        if tokens > 1:
            recording = self._hold_recording(arena)
            if arena.supports_refill and (ahead := min(arena.free_prompts, arena.prompts_at_once)):
                arena.encode({len(prompts) + number: prompts[0] for number in range(ahead)})
            del recording
            arena.leave([0])
        del written

    @torch.no_grad()
    def score(self, size: PassSize) -> None:
        """Computes log-probs of whole texts."""
        batch, stream = self._texts(size)
        options = self.work.scoring()
        options["traced"] = self.work.target.device
        with self._reference() as model:
            score_streams(model, batch, [stream], **options)

    def learn(self, size: PassSize) -> None:
        """Computes gradients as of a part of a step, which finds those of another."""
        self.begin_gradients()
        config = self.work.config
        batch, stream = self._texts(size)
        counts = StepCounts(len(batch), len(batch.ids), config.max_new_tokens)
        options = self.work.learning(config.kl_coef)
        options["traced"] = self.work.target.device
        accumulate_streams(self.policy, batch, [stream], counts, **options)
        self.drop_gradients()

    def begin_gradients(self) -> None:
        """Makes the gradients that an earlier part of a step leaves."""
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter, dtype=master_dtype(parameter))

    def drop_gradients(self) -> None:
        """Drops gradients, of a pass that went well or of one that did not."""
        for parameter in self.trained:
            parameter.grad = None

    def _texts(self, size: PassSize) -> tuple[Batch, Stream]:
        """Returns a batch with the columns that a step's has, and the stream that it is."""
        prompts, per_prompt = self._prompts(size)
        rows, config = len(prompts) * per_prompt, self.work.config
        group, tokens = [row // per_prompt for row in range(rows)], rows * size.completion_tokens
        nothing, flags = torch.zeros(tokens), torch.ones(tokens, dtype=torch.bool)
        batch = Batch(
            [Prompt("", "", {})] * len(prompts),
            prompts,
            torch.tensor(group),
            torch.full((rows,), size.completion_tokens),
            flags[:rows],
            [""] * rows,
            nothing.long(),
            nothing,
            flags,
            credit=nothing,
            old_logp=nothing if config.scores_policy else None,
            ref_logp=nothing if config.uses_reference else None,
        )
        stream = make_stream(prompts, group, [np.zeros(size.completion_tokens, dtype=np.int64)] * rows)
        return batch, replace(stream, tokens=torch.arange(tokens))

    def _prompts(self, size: PassSize) -> tuple[list[list[int]], int]:
        """Prompts of equal length, and rows of each: whole groups, or part of one."""
        per_prompt = min(size.rows, self.work.config.group_size)
        return [[0] * size.prompt_tokens for _ in range(size.rows // per_prompt)], per_prompt


def kv_bytes_per_token(model: PretrainedConfig, dtype: torch.dtype) -> int:
    """2 · layers · kv_heads · head_dim · bytes: keys and values of one token of one row."""
    text = model.get_text_config(decoder=True)
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int(2 * text.num_hidden_layers * kv_heads * width * dtype.itemsize)
