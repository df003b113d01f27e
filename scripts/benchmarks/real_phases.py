"""The phases of training at chosen shapes, on models with random weights, and what the allocator says.

The truth that predictions of memory are held against. Its meter is the profiler's record of every
allocation, which shares nothing with the meter that predictions are made from (`LiveBytes`). The
worst case is run: completions never end early, but for groups that leave just before the end.
"""

import ctypes
import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PretrainedConfig

from grpo.config import Config
from grpo.config.groups import Checkpointing, LoraSettings, SamplingSettings
from grpo.distributed.shard import shard_model
from grpo.learning.loss import LossSettings, loss_counts
from grpo.learning.objectives import GRPOBatch, accumulate_grpo
from grpo.memory import MemoryMonitor, Shape
from grpo.model.adapters import adapters_off, add_adapters, store_base
from grpo.model.cpu.feed_forward import slice_feed_forward
from grpo.model.load import RolloutModel, load_model
from grpo.model.target import Target, make_target
from grpo.plan.workload import Workload
from grpo.rollout.decoder import joining_groups
from grpo.rollout.sample import rollout
from grpo.scoring.micro_batches import score
from grpo.types import Rollout
from grpo.workbench.worst_case import FullLengthTokenizer, nameless_prompts

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    """A model, and what its memory depends on besides shapes."""

    name: str
    model: PretrainedConfig = field(repr=False)
    compute_dtype: torch.dtype = torch.float32
    checkpointing: Checkpointing = "none"
    kl: bool = True
    group_size: int = 8
    lora: LoraSettings = field(default_factory=LoraSettings)

    @property
    def target(self) -> Target:
        return make_target(self.model, CPU, self.compute_dtype)

    def workload(self, longest: Shape) -> Workload:
        """What the planner is told: batches of `longest.rows`, and texts as long."""
        config = Config(
            device="cpu", batch_size=longest.rows, group_size=self.group_size,
            sampling=SamplingSettings(max_new_tokens=longest.new_tokens),
            loss=LossSettings(kl_coef=0.02 if self.kl else 0.0), gradient_checkpointing=self.checkpointing,
            lora=self.lora,
        )  # fmt: skip
        return Workload(config, self.target, longest.prompt_tokens, reference_here=True)


class RealPhases:
    """Ready-made work of each phase; weights are random, as memory does not depend on them."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.model = AutoModelForCausalLM.from_config(
            setting.model, dtype=torch.float32, attn_implementation=setting.target.attention
        ).eval()
        if setting.lora.load_in_4bit:  # which happens while a model is read
            with TemporaryDirectory() as folder:
                self.model.save_pretrained(folder)
                self.model = load_model(folder, setting.target, in_4bit=True)
        slice_feed_forward(self.model)
        if setting.lora.on:
            add_adapters(self.model, setting.lora)
            store_base(self.model, setting.compute_dtype)
        self._sampler = RolloutModel(self.model, setting.compute_dtype).model

    def shard(self) -> None:
        """Over all processes that there are: from here on each phase is a collective."""
        shard_model(self.model, self._setting.compute_dtype, CPU)
        self._sampler = self.model

    def prepare(self, phase: str, shape: Shape) -> Callable[[], object]:
        """`phase` as a step runs it, `shape.rows` at a time; split ones in at least two parts."""
        if not self._setting.lora.on:
            self.model.requires_grad_(phase != "score")  # what is scored is the reference, which is frozen
        num_rows = max(shape.rows, self._setting.group_size) * (2 if phase.endswith("split") else 1)
        if phase.startswith("sample"):
            return self._sampling(shape, num_rows)
        made = _made_up(shape, num_rows, self._setting.group_size)
        return self._scoring(made, shape) if phase == "score" else self._learning(made, shape)

    def _sampling(self, shape: Shape, num_rows: int) -> Callable[[], object]:
        group_size, new_tokens = self._setting.group_size, shape.new_tokens
        waiting = num_rows > shape.rows
        together = joining_groups(self._setting.model, shape.rows // group_size) if waiting else 0
        if together:  # all that wait find a place, and one group more leaves
            num_rows = shape.rows + shape.rows // group_size // together * together * group_size
        prompts = nameless_prompts(num_rows // group_size)
        uniforms = torch.rand(num_rows, new_tokens) / 2 + 0.5  # token 0 ends a text: only 0 samples it
        if shape.rows > group_size and new_tokens > 1:  # some end while the others' cache is full
            uniforms[shape.rows - max(1, together) * group_size : shape.rows, -2] = 0.0
            if waiting:  # the last to come leaves at once, and what stays is copied
                uniforms[-group_size:, 0] = 0.0
        settings = SamplingSettings(max_new_tokens=new_tokens)
        tokenizer: Any = FullLengthTokenizer(shape.prompt_tokens)
        return lambda: rollout(
            self._sampler, tokenizer, prompts, uniforms, settings, rows=shape.rows, ends=(0,)
        )

    def _scoring(self, made: Rollout, shape: Shape) -> Callable[[], object]:
        setting = self._setting

        def work() -> object:
            with adapters_off(self.model) if setting.lora.on else nullcontext():
                return score(self.model, made, rows=shape.rows, temperature=1.0, dtype=setting.compute_dtype)

        return work

    def _learning(self, made: Rollout, shape: Shape) -> Callable[[], object]:
        setting, mask = self._setting, made.mask
        ref_logp = torch.zeros(mask.shape) if setting.kl else None
        batch = GRPOBatch(
            made, torch.ones(len(mask)), mask, loss_counts(mask, shape.new_tokens), None, ref_logp
        )
        loss = LossSettings(kl_coef=0.02 if setting.kl else 0.0)
        self.model.zero_grad(set_to_none=True)
        return lambda: accumulate_grpo(
            self.model, batch, settings=loss, temperature=1.0, dtype=setting.compute_dtype,
            rows=shape.rows, checkpointing=setting.checkpointing,
        )  # fmt: skip


def _made_up(shape: Shape, num_rows: int, group_size: int) -> Rollout:
    num_prompts, tokens = num_rows // group_size, (num_rows, shape.new_tokens)
    return Rollout(
        prompts=nameless_prompts(num_prompts),
        prompt_ids=[[1] * shape.prompt_tokens] * num_prompts,
        completion_ids=torch.ones(tokens, dtype=torch.long),
        lengths=torch.full((num_rows,), shape.new_tokens),
        terminated=torch.zeros(num_rows, dtype=torch.bool),
        sampler_logp=torch.zeros(tokens),
        completions=[""] * num_rows,
    )


# ------------------------------------------------------------------------------------------ meters


def allocator_peak(work: Callable[[], object]) -> int:
    """Most bytes that `work` held of the CPU allocator at once, by the profiler's record."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = work()
    del result
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    changes = [
        (event.start_ns(), event.nbytes())
        for event in recorded.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    changes.sort(key=lambda change: change[0])
    held = peak = 0
    for _, size in changes:
        held += size
        peak = max(peak, held)
    return peak


def resident_peak(work: Callable[[], object]) -> int:
    """Bytes by which the process grew at its largest."""
    monitor = MemoryMonitor(CPU)
    _give_back_what_is_free()
    before = monitor.memory().ours_bytes
    with monitor.phase() as reading:
        work()
    return reading.process_bytes - before


def _give_back_what_is_free() -> None:
    """glibc keeps freed blocks, which would then not show as growth."""
    gc.collect()
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)


def own_meter(work: Callable[[], object]) -> int:
    """Bytes as a training step measures them while it calibrates."""
    with MemoryMonitor(CPU).phase(exact=True) as reading:
        work()
    assert reading.added_bytes is not None
    return reading.added_bytes
