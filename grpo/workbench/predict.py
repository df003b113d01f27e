"""Predicted memory of a whole training step, by phase and component, for either objective.

The planner is the trainer's own, on traces of the real phases (`grpo.plan.trace`): no device is needed, no
weights are made. GRPO's phases are those of a run; plain language modelling has one.
"""

from dataclasses import dataclass, field, replace
from functools import partial

import torch
from transformers import PretrainedConfig

from grpo.config import Config, SettingsError
from grpo.config.groups import Checkpointing, CheckpointingSetting, LoraSettings, SamplingSettings
from grpo.learning.loss import LossSettings
from grpo.memory import Device, Fit, largest_multiple
from grpo.memory.budget import CONTEXT_BYTES, DeviceMemory
from grpo.memory.device import FIRST_SLACK
from grpo.model.activation_checkpointing import choose_checkpointing
from grpo.model.adapters import check_peft
from grpo.model.target import make_target
from grpo.plan.absent import STARTED_BYTES, see_trace
from grpo.plan.phases_at import PhasesAt
from grpo.plan.tables import ELSE, added_parts
from grpo.plan.trace import Card, TracedPhases
from grpo.plan.warm_up import warm_up
from grpo.plan.workload import Workload
from grpo.workbench.flags import Objective
from grpo.workbench.language import WindowPhases
from grpo.workbench.models import context_of
from grpo.workbench.spec import ModelSpec


def bytes_at_start(device_type: str) -> int:
    """What a process that has loaded nothing yet will hold besides tensors, as a limit counts it."""
    if device_type != "cpu":
        return CONTEXT_BYTES
    return Device("cpu", limit_bytes=2**62).used_bytes() + STARTED_BYTES


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


class Parts(dict[str, float]):
    """Bytes at a phase's peak, by component."""

    @property
    def peak_bytes(self) -> float:
        return sum(self.values())


class StepMemory:
    """Bytes of a step at any batch size. `overhead_bytes`: what the process holds besides tensors."""

    def __init__(self, settings: StepSettings, *, overhead_bytes: int = 0) -> None:
        check_peft(settings.lora)
        self.settings, self._overhead_bytes = settings, overhead_bytes
        lm = settings.objective == "lm"
        self._work = _workload(settings)
        self._traced = TracedPhases(self._work.phase_settings(), WindowPhases if lm else PhasesAt)
        self._slack = FIRST_SLACK if settings.device_type == "cpu" else 0.0
        self._phases = ("learn",) if lm else self._work.phase_settings().phases
        self.resident = self._work.resident(
            self._traced.num_parameters, self._traced.trained_sizes, self._traced.frozen_bytes
        )
        """Bytes that exist all along, by component."""
        if lm:  # there is no sampler, so nobody holds a copy for it
            self.resident.pop("sampler's copy", None)

    @property
    def gradient_bytes(self) -> int:
        return self._work.target.exact_dtype.itemsize * self.num_trained

    @property
    def num_trained(self) -> int:
        """Numbers that are trained."""
        return sum(self._traced.trained_sizes)

    def by_phase(self, batch_size: int, rows: int | None = None) -> dict[str, Parts]:
        """By phase, for `rows` (all) at once of a batch."""
        size = self._work.size(rows or batch_size)
        found = {}
        for phase in self._phases:
            added = self._traced.added_bytes(phase, size)
            parts = added_parts(added, self._work.added_parts(phase, size, self.num_trained))
            beside = self._overhead_bytes + self._slack * added
            found[phase] = Parts({**self.resident, **parts, ELSE: beside})
        return found

    def largest_phase(self, batch_size: int, rows: int | None = None) -> tuple[str, Parts]:
        """The phase that holds most, and what."""
        each = self.by_phase(batch_size, rows)
        phase = max(each, key=lambda name: each[name].peak_bytes)
        return phase, each[phase]

    def largest_batch(self, usable_bytes: float, *, at_most: int) -> int:
        """The largest batch whose every phase fits all at once; 0 where the smallest does not."""
        multiple = self.settings.multiple
        most = at_most // multiple * multiple
        total = max(0, int(usable_bytes))
        card = Card(DeviceMemory(total, total, 0), utilization=1.0, slack=self._slack)
        card.held_bytes = self._overhead_bytes + sum(self.resident.values())
        fit = Fit(card, group_size=multiple)
        group = self._work.config.group_size
        rows = -(-max(1, most) // group) * group
        work = replace(self._work, config=replace(self._work.config, batch_size=rows))
        warm_up(fit, work, partial(see_trace, fit, self._traced), phases=self._phases, bold=True)
        room = fit.room_bytes()

        def fits(size: int) -> bool:
            return all(fit.needs(phase, work.size(size)) <= room for phase in self._phases)

        return largest_multiple(fits, at_most=most, multiple=multiple)


def _workload(settings: StepSettings) -> Workload:
    group = max(2, settings.multiple)  # a run has no smaller ones; windows have none at all
    config = Config(
        batch_size=group, group_size=group,
        sampling=SamplingSettings(max_new_tokens=settings.new_tokens),
        loss=LossSettings(kl_coef=0.02 if settings.kl else 0.0),
        gradient_checkpointing=settings.checkpointing, lora=settings.lora,
    )  # fmt: skip
    target = make_target(settings.model, torch.device(settings.device_type), settings.compute_dtype)
    if settings.objective == "lm":
        return Workload(replace(config, loss=LossSettings(kl_coef=0.0)), target, 0)
    return Workload(config, target, settings.prompt_tokens)
