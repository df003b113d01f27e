"""The phases of training on models with random weights, and what the allocator says of them.

The truth that traces are held against. Its meter is the profiler's record of every allocation, which shares
nothing with the meter that predictions are made from (`LiveBytes`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PretrainedConfig

from grpo.config import Config
from grpo.config.groups import Checkpointing, LoraSettings
from grpo.learning.masters import split_masters
from grpo.memory import PassSize
from grpo.model.activation_checkpointing import recompute_activations
from grpo.model.adapters import add_adapters, store_base
from grpo.model.load import load_model
from grpo.model.target import Target, make_target
from grpo.model.weights import RolloutModel, make_reference
from grpo.plan.phase_probe import PhaseProbe
from grpo.plan.workload import Workload
from grpo.types import Prompt

CPU = torch.device("cpu")


@dataclass(frozen=True)
class FullLengthTokenizer:
    """As much of a tokenizer as sampling needs: every text has `prompt_tokens` tokens."""

    prompt_tokens: int

    def __call__(self, texts: Sequence[str], **options: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1] * self.prompt_tokens for _ in texts]}

    def batch_decode(self, rows: Sequence[object], skip_special_tokens: bool) -> list[str]:
        return [""] * len(rows)


def nameless_prompts(count: int) -> list[Prompt]:
    """Prompts without text, as the tokenizer above does not read it."""
    return [Prompt(str(i), "", {}) for i in range(count)]


@dataclass(frozen=True)
class Setting:
    """A model, and what its memory depends on besides sizes."""

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

    def workload(self, longest: PassSize | None = None) -> Workload:
        """Returns the workload for the planner: batches of `longest.rows`, and texts as long; else of one
        group."""
        longest = longest or PassSize(self.group_size)
        config = Config(
            device="cpu",
            batch_size=longest.rows,
            group_size=self.group_size,
            max_new_tokens=longest.completion_tokens,
            kl_coef=0.02 if self.kl else 0.0,
            gradient_checkpointing=self.checkpointing,
            **vars(self.lora),
        )
        return Workload(config, self.target, longest.prompt_tokens)


class RealPhases(PhaseProbe):
    """Weights are random, as memory does not depend on them."""

    def __init__(self, setting: Setting) -> None:
        model = AutoModelForCausalLM.from_config(
            setting.model, dtype=torch.float32, attn_implementation=setting.target.attention
        ).eval()
        if setting.lora.load_in_4bit:  # which happens while a model is read
            with TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                model = load_model(folder, setting.target, in_4bit=True)
        recompute_activations(model)
        if setting.lora.uses_lora:
            add_adapters(model, setting.lora)
            store_base(model, setting.compute_dtype)
        reference = make_reference(model, CPU, setting.compute_dtype)
        splits = setting.workload().splits_masters
        self.low_bits = split_masters(model, setting.compute_dtype) if splits else {}
        sampler = RolloutModel(model, setting.compute_dtype).model
        super().__init__(setting.workload(), model, sampler, reference.model)

    def prepare(self, phase: str, size: PassSize) -> Callable[[], object]:
        """One pass, for a meter."""
        return partial(self.run, phase, size)


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
