"""The real phases as functions of their shape, for `memory/` to trace: on fake tensors nothing is computed.

A trace runs the code that training runs (prefill and decoding, the chunked head, the loss and its
backward pass) on a model without storage, and counts what would have been allocated. The fake tensors
say they are the CPU's: fake CUDA tensors need a CUDA build. Left out: what kernels use within themselves.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo.config.groups import Checkpointing, LoraSettings, SamplingSettings
from grpo.distributed.shard import inside
from grpo.learning.loss import LossSettings, StepCounts, grpo_loss
from grpo.memory import Shape
from grpo.memory.live import LiveBytes
from grpo.model.adapters import adapters_off, add_adapters, has_adapters, linear_layers, store_base
from grpo.model.cpu import slices
from grpo.model.cpu.feed_forward import slice_feed_forward
from grpo.model.four_bits import outline
from grpo.model.prefill import pad_prompts
from grpo.model.target import Target
from grpo.plan.trace.depth import has_equal_layers
from grpo.plan.trace.fsdp_footprint import Gathering
from grpo.plan.trace.quick import QuickFakeMode
from grpo.rollout.decoder import (
    has_static_cache,
    prompt_places,
    records_steps,
    replaced_at_once,
)
from grpo.rollout.slots import Slots
from grpo.scoring.logprobs import TokenLoss
from grpo.scoring.micro_batches import MicroBatch, micro_batch_logprobs

PHASES = ("sample", "sample split", "score", "learn", "learn split")
"""What is traced. Split is in parts: a group takes another's place, gradients of earlier parts are there."""


def split_name(phase: str) -> str:
    """What a phase is called in PHASES when its rows go through in parts."""
    return f"{phase} split" if f"{phase} split" in PHASES else phase


@dataclass(frozen=True)
class PhaseSettings:
    """Everything but the shape that the phases' memory depends on."""

    target: Target
    """Where the phases will run."""
    group_size: int
    sampling: SamplingSettings
    loss: LossSettings
    checkpointing: Checkpointing = "none"
    scores_policy: bool = False
    """Whether the policy is scored and not the frozen reference alone: autocast keeps its cast weights."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    processes: int = 1
    """That the model is sharded over."""


class FakePhases:
    """A model without storage, and the phases on it."""

    def __init__(self, settings: PhaseSettings, mode: QuickFakeMode | None = None) -> None:
        """mode: that of others, which then remember each other's operations."""
        self.settings = settings
        self._mode = mode or QuickFakeMode()
        target, dtype = settings.target, settings.target.exact_dtype
        with self._mode:
            self.policy = self._make_model(dtype)
            self.has_equal_layers = has_equal_layers(self.policy)
            self.num_parameters = sum(parameter.numel() for parameter in self.policy.parameters())
        self.frozen_bytes = 0
        if settings.lora.on:
            self._add_adapters(dtype)
        self._trained = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        self.trained_sizes = [parameter.numel() for parameter in self._trained]
        with self._mode:
            self._sampler = self.policy
            self._gathering: Gathering | None = None
            if settings.processes > 1:
                self.policy = self._sampler = self._in_compute_dtype(self.policy)
                self._gathering = Gathering(self.policy, settings.processes, dtype, copies=target.on_cpu)
            elif target.is_lower and not settings.lora.on:
                self._sampler = self._in_compute_dtype(self._make_model(dtype).requires_grad_(False))

    def trace(self, phase: str, shape: Shape) -> list[tuple[str, int]]:
        work, gradients_there = self._works()[phase]
        already = 0
        with self._mode:
            self.policy.zero_grad(set_to_none=True)
            if self._gathering is not None:
                self._gathering.forget(gradients=gradients_there)
                already = self._gathering.gradient_bytes if gradients_there else 0
            elif gradients_there:
                for parameter in self._trained:
                    parameter.grad = torch.zeros_like(parameter)
                    already += parameter.grad.nbytes
            target = self.settings.target
            first = slices.traced_for(target.device, parts_too=self.settings.checkpointing != "selective")
            self._live = LiveBytes(target.device.type, target.block_bytes, keep_log=True)
            with first, self._mode.counting(self._live):
                work(shape)
        return [(operation, already + held) for operation, held in self._live.log]

    @property
    def _gradients_first(self) -> bool:
        """Whether gradients are there before the first part is learned from, as `begin_gradients` has it."""
        return self.settings.target.gradients_first and self.settings.processes == 1

    def _works(self) -> dict[str, tuple[Callable[[Shape], None], bool]]:
        """What each phase does, and whether gradients are there already."""
        return {
            "sample": (self._sample, False), "sample split": (partial(self._sample, split=True), False),
            "score": (self._score, False),
            "learn": (self._learn, self._gradients_first), "learn split": (self._learn, True),
        }  # fmt: skip

    @torch.no_grad()
    def _sample(self, shape: Shape, *, split: bool = False) -> None:
        inside(self._sampler, partial(self._decode, shape, split=split))

    def _decode(self, shape: Shape, *, split: bool) -> None:
        """Prefill, then the last token, when the cache is full, and groups leaving, or one for another."""
        prompts, per_prompt = self._prompts(shape)
        rows, tokens = len(prompts) * per_prompt, shape.new_tokens
        device_type = self.settings.target.device.type
        made = (rows * 2 if split else rows, tokens + 1)  # split: in two parts, if not more
        written = torch.zeros(made, dtype=torch.long), torch.zeros(made)
        is_static, sampling = has_static_cache(self._sampler), self.settings.sampling
        settings = replace(sampling, max_new_tokens=tokens)

        def slots_for(groups: int) -> Slots:
            return Slots(self._sampler, groups, per_prompt, settings, ends=(0,))

        def uniforms(groups: int) -> Tensor:
            return torch.zeros(1, 1).expand(rows, tokens)[torch.arange(groups * per_prompt)]

        slots = slots_for(len(prompts))
        width = prompt_places(self._sampler.config, shape.prompt_tokens, device_type)
        slots.start(prompts, uniforms(len(prompts)), longest_prompt=width)
        slots.skip(max(0, tokens - 2))
        if tokens > 1:
            recorded = is_static and records_steps(self._sampler.config, device_type)
            recording = self._advance(slots, recorded=recorded)
            if split and is_static and len(prompts) > 1:
                replaced = replaced_at_once(len(prompts))
                slots.replace(range(replaced), prompts[:replaced], uniforms(replaced))
            del recording
            if len(prompts) > 1:
                slots.keep(range(1, len(prompts)))
        del written

    def _advance(self, slots: Slots, *, recorded: bool) -> Tensor | None:
        """One token more; what its recording holds between its runs: room for all but what stays."""
        held, logged = self._live.live_bytes, len(self._live.log)
        slots.advance()
        if not recorded:
            return None
        return torch.empty(max(size for _, size in self._live.log[logged:]) - held, dtype=torch.uint8)

    @torch.no_grad()
    def _score(self, shape: Shape) -> None:
        with nullcontext() if self.settings.scores_policy else self._as_reference():
            self._logprobs(shape, entropy=False)

    def _as_reference(self) -> AbstractContextManager[object]:
        return adapters_off(self.policy) if has_adapters(self.policy) else _frozen(self.policy)

    def _learn(self, shape: Shape) -> None:
        settings, rows, tokens = self.settings.loss, shape.rows, shape.new_tokens
        counts = StepCounts(rows, rows * tokens, tokens)

        def loss(logp: Tensor, *, measured: bool = False) -> Tensor:
            ref_logp = torch.zeros_like(logp) if settings.kl_coef else None
            mask, advantages = torch.ones_like(logp, dtype=torch.bool), torch.zeros(rows, dtype=logp.dtype)
            return grpo_loss(
                logp, None, ref_logp, advantages, mask, counts=counts, settings=settings, measured=measured
            )[0]

        logp, _ = self._logprobs(
            shape, entropy=True, loss=loss if settings.is_per_token else None,
            checkpointing=self.settings.checkpointing,
        )  # fmt: skip
        loss(logp, measured=True).backward()  # type: ignore[no-untyped-call]

    def _logprobs(
        self,
        shape: Shape,
        *,
        entropy: bool,
        loss: TokenLoss | None = None,
        checkpointing: Checkpointing = "none",
    ) -> tuple[Tensor, Tensor | None]:
        prompts, per_prompt = self._prompts(shape)
        rows = len(prompts) * per_prompt
        batch = MicroBatch(
            rows=torch.arange(rows),
            prompts=pad_prompts(prompts)._replace(is_padded=True),  # which takes more
            row_to_prompt=torch.arange(rows) // per_prompt,
            completion_ids=torch.zeros(rows, shape.new_tokens, dtype=torch.long),
        )
        return micro_batch_logprobs(
            self.policy, batch, temperature=self.settings.sampling.temperature,
            dtype=self.settings.target.dtype, entropy=entropy, loss=loss, checkpointing=checkpointing,
        )  # fmt: skip

    def _prompts(self, shape: Shape) -> tuple[list[list[int]], int]:
        """Prompts of equal length, and rows of each: whole groups, or part of one."""
        per_prompt = min(shape.rows, self.settings.group_size)
        return [[0] * shape.prompt_tokens for _ in range(shape.rows // per_prompt)], per_prompt

    def _in_compute_dtype(self, model: PreTrainedModel) -> PreTrainedModel:
        for parameter in model.parameters():  # not the buffers
            parameter.data = parameter.data.to(self.settings.target.dtype)
        return model

    def _add_adapters(self, dtype: torch.dtype) -> None:
        if self.settings.lora.load_in_4bit:
            outline(self.policy, linear_layers(self.policy), self._mode)
        # Not inside the mode, in which peft cannot move them: made without storage, then faked.
        add_adapters(self.policy, self.settings.lora, empty=True)
        with self._mode:
            for module in self.policy.modules():
                for name, parameter in list(module.named_parameters(recurse=False)):
                    if parameter.is_meta:
                        setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype)))
            store_base(self.policy, self.settings.target.dtype)
        self.frozen_bytes = sum(each.nbytes for each in self.policy.parameters() if not each.requires_grad)

    def _make_model(self, dtype: torch.dtype) -> PreTrainedModel:
        target = self.settings.target
        model = AutoModelForCausalLM.from_config(
            target.model_config, dtype=dtype, attn_implementation=target.attention
        ).eval()
        if target.on_cpu:
            slice_feed_forward(model)
        if target.device.type == "cuda":
            _take_norms_as_cuda_does(model)
        return model


def _take_norms_as_cuda_does(model: PreTrainedModel) -> None:
    """CUDA's autocast takes layer norms in fp32, whatever comes in; the CPU's, which is traced, does not."""

    def exact(norm: nn.LayerNorm, values: Any) -> Tensor:
        weight: Any = norm.weight
        bias: Any = norm.bias
        if torch.is_autocast_enabled("cpu"):
            values, weight, bias = (None if each is None else each.float() for each in (values, weight, bias))
        return F.layer_norm(values, norm.normalized_shape, weight, bias, norm.eps)

    for module in model.modules():
        if type(module) is nn.LayerNorm:
            module.forward = MethodType(exact, module)  # type: ignore[method-assign]


@contextmanager
def _frozen(model: PreTrainedModel) -> Iterator[None]:
    model.requires_grad_(False)
    yield
    model.requires_grad_(True)
