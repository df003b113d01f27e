"""Predicted memory of a whole training step, by phase and component, for either objective.

The predictor is the trainer's own (`grpo.memory`, on traces of the real phases): no device is needed,
no weights are made. GRPO's phases are those of a run; plain language modelling has two.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from transformers import PretrainedConfig

from grpo.config import Config, SettingsError
from grpo.config.groups import Checkpointing, CheckpointingSetting, LoraSettings, SamplingSettings
from grpo.learning.loss import LossSettings
from grpo.memory import MemoryMonitor, PhaseSpec, Predictor, ProcessMemory, Shape
from grpo.memory.phase import Footprint
from grpo.memory.planner import largest_multiple
from grpo.model.activation_checkpointing import choose_checkpointing
from grpo.model.adapters import check_peft
from grpo.model.target import make_target
from grpo.plan.build import TracedFit, process_memory
from grpo.plan.trace import PhaseTracer
from grpo.plan.workload import Workload, logits_parts, resident_parts, scratch_bytes, usual_slack
from grpo.workbench import language
from grpo.workbench.flags import Objective
from grpo.workbench.models import context_of
from grpo.workbench.spec import ModelSpec


@dataclass(frozen=True)
class StepSettings:
    """What a step's memory depends on besides the batch size. Tokens are of the longest rows."""

    objective: Objective
    model: PretrainedConfig
    compute_dtype: torch.dtype
    prompt_tokens: int = 60
    """Of the longest prompt (GRPO)."""
    new_tokens: int = 144
    """Of the longest completion (GRPO), or of a window (language modelling)."""
    group_size: int = 8
    """Completions of a prompt (GRPO)."""
    kl: bool = True
    """Whether there is a reference model (GRPO)."""
    checkpointing: Checkpointing = "none"
    device_type: str = "cpu"
    lora: LoraSettings = field(default_factory=LoraSettings)

    @property
    def multiple(self) -> int:
        """What a batch size is a multiple of."""
        return self.group_size if self.objective == "grpo" else 1


def step_settings(
    spec: ModelSpec,
    compute_dtype: torch.dtype,
    device_type: str,
    *,
    objective: Objective,
    prompt_tokens: int,
    max_new_tokens: int,
    group_size: int,
    kl: bool,
    checkpointing: CheckpointingSetting,
    lora: LoraSettings,
) -> StepSettings:
    """The same from a person's settings. SettingsError for texts beyond what the model reaches."""
    config = spec.config()
    reach, tokens = context_of(config), max_new_tokens
    if objective == "lm":
        tokens = min(spec.context, reach)
    elif prompt_tokens + tokens > reach:
        raise SettingsError(
            f"prompt_tokens and max_new_tokens are {prompt_tokens} and {tokens}, but the model reaches "
            f"{reach} tokens in all: give less."
        )
    return StepSettings(
        objective, config, compute_dtype, prompt_tokens, tokens, group_size, kl,
        choose_checkpointing(checkpointing), device_type, lora,
    )  # fmt: skip


class StepMemory:
    """Bytes of a step at any batch size. `overhead_bytes`: what the process holds besides tensors."""

    def __init__(self, settings: StepSettings, *, overhead_bytes: int = 0) -> None:
        check_peft(settings.lora)
        self.settings = settings
        self._work = _workload(settings)
        if settings.objective == "grpo":
            tracer = PhaseTracer(self._work.phase_settings())
            self._process = process_memory(
                self._work, tracer, _monitor(settings), overhead_bytes=overhead_bytes
            )
        else:
            self._process = _language_memory(self._work, settings, overhead_bytes)

    def footprints(self, batch_size: int, rows: int | None = None) -> dict[str, Footprint]:
        """By phase, for `rows` (all) at once of a batch."""
        rows = rows or batch_size
        shape = Shape(rows, self.settings.prompt_tokens, self.settings.new_tokens)
        if self.settings.objective == "lm":
            shape = shape._replace(prompt_tokens=1)
        return {
            phase: self._process.footprint(phase, shape, batch_size=batch_size)
            for phase in self._process.phases
        }

    def largest_phase(self, batch_size: int, rows: int | None = None) -> tuple[str, Footprint]:
        """The phase that holds most, and what."""
        each = self.footprints(batch_size, rows)
        phase = max(each, key=lambda name: each[name].peak_bytes)
        return phase, each[phase]

    def largest_batch(self, usable_bytes: float, *, at_most: int, with_error: bool = True) -> int:
        """The largest batch whose every phase fits all at once; 0 where the smallest does not.

        with_error: the stated error has to fit as well.
        """

        def fits(size: int) -> bool:
            worst = (
                each.upper_bytes if with_error else each.peak_bytes for each in self.footprints(size).values()
            )
            return max(worst) <= usable_bytes

        return largest_multiple(fits, at_most=at_most, multiple=self.settings.multiple)


def _workload(settings: StepSettings) -> Workload:
    config = Config(
        batch_size=settings.group_size, group_size=settings.group_size,
        sampling=SamplingSettings(max_new_tokens=settings.new_tokens),
        loss=LossSettings(kl_coef=0.02 if settings.kl else 0.0),
        gradient_checkpointing=settings.checkpointing, lora=settings.lora,
    )  # fmt: skip
    if settings.objective == "lm":
        config = replace(config, loss=LossSettings(kl_coef=0.0))
    target = make_target(settings.model, torch.device(settings.device_type), settings.compute_dtype)
    return Workload(config, target, settings.prompt_tokens, reference_here=True)


def _language_memory(work: Workload, settings: StepSettings, overhead_bytes: int) -> ProcessMemory:
    """Learning from windows, and the update. There is no sampler, so nobody holds a copy for it."""
    tracer = PhaseTracer(work.phase_settings(), kind=language.FakeWindows)
    resident = resident_parts(work, tracer.num_parameters, tracer.trained_sizes, tracer.frozen_bytes)
    resident.pop("sampler's copy", None)
    longest = Shape(1, 1, settings.new_tokens)
    traced = {name: TracedFit(tracer, name, longest, group_size=1) for name in language.PHASES}
    gradients = {"gradients": work.exact_bytes * sum(tracer.trained_sizes)}
    specs = {
        "learn": PhaseSpec(
            language.SPLIT if work.gradients_first else language.WHOLE, language.SPLIT, None,
            lambda shape: {**gradients, **logits_parts(work, shape)},
        ),
        "update": PhaseSpec("update", "update", None, lambda shape: gradients),
    }  # fmt: skip
    fits: dict[str, Callable[[Shape], float]] = {
        **traced,
        "update": lambda shape: float(gradients["gradients"]),
    }
    scratch = {name: scratch_bytes(name, work.target) for name in fits}
    return ProcessMemory(
        specs, Predictor(fits, scratch_bytes=scratch), _monitor(settings), resident=lambda: resident,
        batch_size=1, overhead_bytes=overhead_bytes, slack=partial(usual_slack, work),
    )  # fmt: skip


def _monitor(settings: StepSettings) -> MemoryMonitor:
    """Only asked where the predictions are for, as the device may not be there."""
    return MemoryMonitor(torch.device(settings.device_type))
