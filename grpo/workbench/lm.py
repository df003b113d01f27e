"""Plain language modelling, which the workbench compares with: learning from windows of text.

A run of it writes the files that a run of the trainer writes. Left out: checkpoints, and the last batch where
it would not be full.
"""

import json
import math
import time
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import yaml
from loguru import logger
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from grpo.config import CONFIG_FILE, Config, to_plain
from grpo.config.groups import Checkpointing, LoraSettings
from grpo.config.sizes import parse_size
from grpo.files import write_whole
from grpo.learning.optimizer import learning_rate, make_optimizer, set_learning_rate
from grpo.learning.step import Stepper, begin_gradients
from grpo.memory import Device, Fit, Pass, Size
from grpo.model.activation_checkpointing import (
    choose_checkpointing,
    recompute_activations,
    recomputed_layers,
)
from grpo.model.adapters import add_adapters, store_base
from grpo.model.load import load_for
from grpo.model.target import Target, choose_device, make_target
from grpo.plan.phases_at import PhasesAt
from grpo.plan.trace import TracedPhases
from grpo.plan.workload import Workload
from grpo.run.tracking import RunTracker
from grpo.scoring.forward import empty_cache
from grpo.scoring.head import Slope, head_pass
from grpo.scoring.micro_batches import computing_in
from grpo.workbench.corpus import open_corpus
from grpo.workbench.sizes import HELDOUT_FILE
from grpo.workbench.task import Task, model_name, model_shape

WHOLE = LoraSettings()
"""All weights are trained."""
EVAL_ROWS = 8
"""Held-out windows at once: their memory must not be what decides whether a small batch fits."""


def window_logprobs(
    model: PreTrainedModel,
    windows: Tensor,
    *,
    dtype: torch.dtype,
    slope: Slope | None = None,
    traced: torch.device | None = None,
) -> Tensor:
    """Log-probs (R, T) of each token but the first of `windows` (R, T + 1), in nats.

    slope: see `head_pass`; with it gradients are added to the parameters'. traced: the device whose memory a
    trace is of.
    """
    windows = windows.to(model.device)
    with computing_in(dtype, model.device), torch.set_grad_enabled(slope is not None):
        hidden = model.base_model(
            input_ids=windows[:, :-1], past_key_values=empty_cache(model), use_cache=True
        ).last_hidden_state  # (R, T, D)
        head = model.get_output_embeddings()
        found = head_pass(
            hidden.detach(), head.weight, windows[:, 1:], bias=head.bias, slope=slope, device=traced
        )
    if found.hidden_gradient is not None:
        hidden.backward(found.hidden_gradient)
    return found.logp.view(windows[:, 1:].shape)


def accumulate_lm(
    model: PreTrainedModel,
    windows: Tensor,
    *,
    dtype: torch.dtype,
    rows: int,
    checkpointing: Checkpointing = "none",
) -> dict[str, float]:
    """Add the gradient of the mean loss over `windows` (N, T + 1), and return it, in nats a token.

    Every token but a window's first is predicted. The split into `rows` at a time changes nothing.
    """
    num_tokens = windows[:, 1:].numel()
    exact = torch.float32 if model.device.type == "mps" else torch.float64

    def slope(logp: Tensor, _: slice) -> Tensor:
        return torch.full_like(logp, -1 / num_tokens)

    total = torch.zeros((), device=model.device, dtype=exact)
    begin_gradients(model)
    with recomputed_layers(model, checkpointing):
        for part in windows.split(rows):
            total -= window_logprobs(model, part, dtype=dtype, slope=slope).sum() / num_tokens
    return {"loss": total.item()}


@torch.no_grad()
def heldout_losses(model: PreTrainedModel, windows: Tensor, *, dtype: torch.dtype, rows: int) -> Tensor:
    """The mean loss of each of `windows` (N, T + 1) in nats a token: (N,)."""
    return torch.cat([-window_logprobs(model, part, dtype=dtype).mean(1) for part in windows.split(rows)])


class WindowPhases(PhasesAt):
    """Learning from windows of `tokens`, the one phase that there is."""

    def learn(self, size: Size) -> None:
        self.begin_gradients()
        windows = torch.zeros(size.rows, 1 + size.tokens, dtype=torch.long)
        with recomputed_layers(self.policy, self.work.checkpointing):
            target = self.work.target
            window_logprobs(
                self.policy, windows, dtype=target.dtype, slope=lambda logp, _: logp, traced=target.device
            )
        self.forget()


def added_bytes(
    target: Target,
    rows: int,
    context: int,
    *,
    checkpointing: Checkpointing = "none",
    lora: LoraSettings = WHOLE,
) -> int:
    """What tensors of an update are predicted to add, gradients among them; traced, on no device."""
    config = Config(gradient_checkpointing=checkpointing, **vars(LoraSettings.of(lora)))
    return TracedPhases(Workload(config, target, 1), WindowPhases).added_bytes("learn", Size(rows, context))


def random_model(target: Target, *, seed: int = 0) -> PreTrainedModel:
    """A model with random weights in fp32 (float64 for fp64), as training holds it."""
    torch.manual_seed(seed)
    with target.device:
        model = AutoModelForCausalLM.from_config(
            target.model_config, dtype=target.exact_dtype, attn_implementation=target.attention
        )
    if target.on_cpu:
        recompute_activations(model)
    return model.to(target.device).eval()


def num_parameters(shape: PretrainedConfig) -> int:
    """Parameters of a model of this shape, tied ones once; nothing is allocated."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape)
    return sum(parameter.numel() for parameter in model.parameters())


# ------------------------------------------------------------------------------------------ a run


def train_lm(task: Task, folder: Path) -> None:
    """All updates, `train.steps` of them, into the files of a run in `folder`.

    FloatingPointError where the loss ends up not finite. Memory may run out.
    """
    train, made = task.train, task.made
    flat = {**to_plain(train), **asdict(made), "data": task.data, "batch_size": task.batch_size,
            "objective": task.objective, "compile": task.compile, "tf32": task.tf32}  # fmt: skip
    write_whole(folder / CONFIG_FILE, yaml.safe_dump(flat, sort_keys=False))
    target = make_target(model_shape(train, made), choose_device(train.device), train.precision)
    corpus, generator = open_corpus(task.data, train, made), torch.Generator().manual_seed(train.seed)
    heldout = corpus.heldout_windows(max(1, train.eval_prompts), made.context)
    model = _model(task, target)
    optimizer = make_optimizer(model, train)
    stepper = Stepper(model, optimizer, train.max_grad_norm)
    kind, size = choose_checkpointing(train.gradient_checkpointing), Size(task.rows, made.context)
    learn = partial(accumulate_lm, model, dtype=target.dtype, rows=task.rows, checkpointing=kind)
    limit = parse_size(train.memory_limit) if train.memory_limit else None
    device = Device(target.device, utilization=1.0, limit_bytes=limit)
    fit = Fit(device)
    with ExitStack() as opened:
        tracker = RunTracker(folder, trackers=(), settings={}, before_step=-1)
        opened.callback(tracker.close)
        predicted = _predicted(fit, target, size, kind, train)
        if predicted is not None:
            line = Pass(
                "learn", size.rows, size.tokens, predicted, None, device.used_bytes(), 0.0, 0, None, []
            )
            tracker.log_memory(0, [[line.as_dict()]])
        learn(heldout[:1])  # and drop it: threads and kernels are there before memory is limited
        model.zero_grad(set_to_none=True)
        if limit is not None:
            opened.enter_context(device.capped())
        if task.compile:
            model.base_model.compile()
        every = train.eval_interval
        for number in range(train.steps + 1):
            start = time.perf_counter()
            if number:
                rate = learning_rate(number - 1, train.steps, train)
                set_learning_rate(optimizer, rate)
                # The same windows in the same order for a seed, however they are cut into batches.
                windows = corpus.train_windows(task.batch_size, made.context, generator)
                with fit.watch("learn", size):
                    metrics = stepper.step(partial(learn, windows))
                tokens = number * task.batch_size * made.context
                seconds, memory = time.perf_counter() - start, device.read().as_metrics()
                known = {"num_tokens": tokens, "learning_rate": rate, "step_time": seconds}
                tracker.log(number, {**known, **metrics, **memory})
                tracker.log_memory(number, [[one.as_dict() for one in fit.take_passes()]])
            if every and (number == train.steps or number % every == 0):
                losses = heldout_losses(model, heldout, dtype=target.dtype, rows=EVAL_ROWS)
                mean = losses.mean().item()
                if not math.isfinite(mean) or (number and stepper.num_skipped == number):
                    raise FloatingPointError(f"after {number} updates the held-out loss is {mean}")
                tracker.log(number, {"eval_loss": mean})
                content = {"step": number, "values": losses.tolist()}
                write_whole(folder / HELDOUT_FILE, json.dumps(content))


def _predicted(fit: Fit, target: Target, size: Size, kind: Checkpointing, lora: LoraSettings) -> int | None:
    """Bytes that an update will add, told to `fit` before the first one, which may not fit."""
    try:
        fit.see("learn", size, added_bytes(target, size.rows, size.tokens, checkpointing=kind, lora=lora))
    except Exception as error:  # a model that only real tensors run
        logger.debug("an update is not traced: {}", error)
        return None
    return int(fit.predict("learn", size))


def _model(task: Task, target: Target) -> PreTrainedModel:
    """A named model with its own weights, or one from numbers with random ones."""
    if task.made.arch is not None:
        return random_model(target, seed=task.train.seed)
    model = load_for(target, model_name(task.train, task.made)).model
    if task.train.uses_lora:
        add_adapters(model, task.train)
        store_base(model, target.dtype)
    return model
