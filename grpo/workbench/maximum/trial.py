"""A few real training steps at one batch size, in a process of its own: what they hold, if they fit.

    python -m grpo.workbench.maximum.trial '{"objective": "lm", …}'

The worst case: windows of the whole context, or prompts and completions of full length, all at once.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from grpo.config.groups import Checkpointing, LoraSettings, OptimizerSettings, Precision, SamplingSettings
from grpo.learning.advantages import group_advantages
from grpo.learning.loss import LossSettings, loss_counts
from grpo.learning.objectives import GRPOBatch, accumulate_grpo, finish_grpo
from grpo.learning.optimizer import make_optimizer
from grpo.learning.step import Stepper
from grpo.memory import Device
from grpo.model.adapters import add_adapters, store_base
from grpo.model.load import RolloutModel
from grpo.model.reference import make_reference
from grpo.model.target import compute_dtype
from grpo.rollout.sample import rollout
from grpo.scoring.micro_batches import score
from grpo.workbench.corpus import open_corpus
from grpo.workbench.language import accumulate_lm
from grpo.workbench.models import load_or_make
from grpo.workbench.processes import worker
from grpo.workbench.spec import ModelSpec
from grpo.workbench.worst_case import FullLengthTokenizer, nameless_prompts

TRIAL_STEPS = 3
Step = Callable[[int], float]
"""Takes so many rows through a whole training step, and returns the loss."""


@dataclass(frozen=True)
class TrialTask:
    """What is tried. `model` are the fields of a `ModelSpec`; lengths are in tokens."""

    objective: Literal["grpo", "lm"]
    model: dict[str, Any]
    batch_size: int
    device: str
    precision: Precision
    prompt_tokens: int
    new_tokens: int
    group_size: int = 8
    kl: bool = True
    checkpointing: Checkpointing = "none"
    data: str | None = None
    memory_limit_bytes: int | None = None
    predicted_bytes: float | None = None
    """What it is expected to hold."""
    steps: int = TRIAL_STEPS
    lora_rank: int = 0


def run_trial(task: TrialTask, say: Callable[[Mapping[str, Any]], None]) -> None:
    """Forward, backward and update, `steps` times; a record after each. Memory may run out."""
    device = torch.device(task.device)
    dtype = compute_dtype(task.precision, device)
    there = Device(device, utilization=1.0, limit_bytes=task.memory_limit_bytes)
    model = load_or_make(ModelSpec(**task.model), device, dtype)
    if task.lora_rank:
        add_adapters(model, LoraSettings(task.lora_rank))
        store_base(model, dtype)
    step = (_grpo_step if task.objective == "grpo" else _language_step)(task, model, dtype)
    step(task.group_size if task.objective == "grpo" else 1)  # threads and kernels are there from now on
    with there.capped() if task.memory_limit_bytes is not None else nullcontext():
        _take_steps(task, there, step, say)


def _take_steps(task: TrialTask, there: Device, step: Step, say: Callable[[Mapping[str, Any]], None]) -> None:
    for number in range(1, task.steps + 1):
        start = time.perf_counter()
        with there.measure() as peak:
            loss = step(task.batch_size)
        record = {
            "step": number, "loss": loss, "seconds": time.perf_counter() - start,
            "before_bytes": peak.process_before_bytes, "allocated_bytes": peak.allocated_bytes,
            "reserved_bytes": peak.reserved_bytes, "process_bytes": peak.process_bytes,
        }  # fmt: skip
        say(record)


def _language_step(task: TrialTask, model: PreTrainedModel, dtype: torch.dtype) -> Step:
    """Learning from windows of the corpus."""
    stepper = Stepper(model, make_optimizer(model, OptimizerSettings()), 1.0)
    corpus = open_corpus(task.data, ModelSpec(**task.model))
    generator = torch.Generator().manual_seed(0)

    def step(rows: int) -> float:
        windows = corpus.train_windows(rows, task.new_tokens, generator)

        def learn() -> dict[str, float]:
            return accumulate_lm(model, windows, dtype=dtype, rows=rows, checkpointing=task.checkpointing)

        return stepper.step(learn)["loss"]

    return step


def _grpo_step(task: TrialTask, model: PreTrainedModel, dtype: torch.dtype) -> Step:
    """Sampling, scoring and learning, with rewards at random."""
    stepper = Stepper(model, make_optimizer(model, OptimizerSettings()), 1.0)
    reference = make_reference(model, model.device) if task.kl else None
    sampler = RolloutModel(model, dtype)
    sampling = SamplingSettings(max_new_tokens=task.new_tokens)
    loss = LossSettings(kl_coef=0.02 if task.kl else 0.0)
    tokenizer: Any = FullLengthTokenizer(task.prompt_tokens)

    def step(rows: int) -> float:
        prompts, uniforms = nameless_prompts(rows // task.group_size), torch.rand(rows, task.new_tokens)
        made = rollout(sampler.model, tokenizer, prompts, uniforms, sampling, rows=rows, ends=())
        ref_logp = None
        if reference is not None:
            with reference.model() as frozen:
                ref_logp = score(frozen, made, rows=rows, temperature=1.0, dtype=dtype)
        advantages = group_advantages(torch.rand(rows), task.group_size)
        counts = loss_counts(made.mask, task.new_tokens)
        batch = GRPOBatch(made, advantages, made.mask, counts, ref_logp=ref_logp)

        def learn() -> dict[str, float]:
            sums = accumulate_grpo(
                model,
                batch,
                settings=loss,
                temperature=1.0,
                dtype=dtype,
                rows=rows,
                checkpointing=task.checkpointing,
            )
            return finish_grpo([sums], counts)

        metrics = stepper.step(learn)
        sampler.refresh()
        return metrics["loss"]

    return step


def main() -> None:
    with worker() as (task, say):
        run_trial(TrialTask(**task), say)


if __name__ == "__main__":
    main()
