"""Plain language modelling, which the workbench compares with: learning from windows of text.

A run of it writes the files that a run of the trainer writes. Left out: checkpoints, and the last batch where
it would not be full.
"""

import json
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
import yaml
from loguru import logger
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from grpo.config import CONFIG_FILE
from grpo.config.groups import Checkpointing, LoraSettings, SamplingSettings
from grpo.config.sizes import parse_size
from grpo.files import write_whole
from grpo.learning.loss import LossSettings
from grpo.learning.optimizer import learning_rate, make_optimizer, set_learning_rate
from grpo.learning.step import Stepper, begin_gradients
from grpo.memory import Device, Fit, Size
from grpo.model.activation_checkpointing import (
    choose_checkpointing,
    recompute_activations,
    recomputed_layers,
)
from grpo.model.adapters import add_adapters, store_base
from grpo.model.load import load_for
from grpo.model.target import Target, choose_device, make_target
from grpo.plan.phases_at import PhasesAt, PhaseSettings
from grpo.plan.trace import TracedPhases
from grpo.run.tracking import RunTracker
from grpo.scoring.forward import empty_cache
from grpo.scoring.logprobs import TokenLoss, completion_logprobs
from grpo.scoring.micro_batches import computing_in
from grpo.workbench.corpus import Corpus, open_corpus
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
    loss: TokenLoss | None = None,
    traced: torch.device | None = None,
) -> Tensor:
    """Log-probs (R, T) of each token but the first of `windows` (R, T + 1), in nats, with gradients.

    loss: see `completion_logprobs`. traced: the device whose memory a trace is of.
    """
    windows = windows.to(model.device)
    with computing_in(dtype, model.device):
        hidden = model.base_model(
            input_ids=windows[:, :-1], past_key_values=empty_cache(model), use_cache=True
        ).last_hidden_state  # (R, T, D)
        head = model.get_output_embeddings()
        logp, _ = completion_logprobs(
            hidden, head.weight, windows[:, 1:], bias=head.bias, loss=loss, device=traced
        )
    return logp


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

    def mean_loss(logp: Tensor) -> Tensor:
        return -logp.sum() / num_tokens

    total = torch.zeros((), device=model.device, dtype=exact)
    begin_gradients(model)
    with recomputed_layers(model, checkpointing):
        for part in windows.split(rows):
            loss = mean_loss(window_logprobs(model, part, dtype=dtype, loss=mean_loss))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
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
        with recomputed_layers(self.policy, self.settings.checkpointing):
            target = self.settings.target
            logp = window_logprobs(
                self.policy, windows, dtype=target.dtype, loss=Tensor.sum, traced=target.device
            )
            logp.sum().backward()  # type: ignore[no-untyped-call]
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
    settings = PhaseSettings(
        target, 1, SamplingSettings(), LossSettings(), checkpointing, scores="nothing", lora=lora
    )  # fmt: skip
    return TracedPhases(settings, WindowPhases).added_bytes("learn", Size(rows, context))


def random_model(shape: PretrainedConfig, target: Target, *, seed: int = 0) -> PreTrainedModel:
    """A model with random weights in fp32 (float64 for fp64), as training holds it."""
    torch.manual_seed(seed)
    with target.device:
        model = AutoModelForCausalLM.from_config(
            shape, dtype=target.exact_dtype, attn_implementation=target.attention
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
    with ExitStack() as limited:
        run, every = _Run(task, folder, limited), task.train.eval_interval
        for number in range(task.train.steps + 1):
            if number:
                run.update(number)
            if every and (number == task.train.steps or number % every == 0):
                run.evaluate(number)


class _Run:
    """What updates and evaluations share. limited: what ends the limit of memory, and closes files."""

    def __init__(self, task: Task, folder: Path, limited: ExitStack) -> None:
        self._task, self._folder, train = task, folder, task.train
        _say_settings(task, folder)
        self._tracker = RunTracker(folder, trackers=(), settings={}, before_step=-1)
        limited.callback(self._tracker.close)
        target = make_target(model_shape(train, task.made), choose_device(train.device), train.precision)
        self._dtype, self._corpus = target.dtype, open_corpus(task.data, train, task.made)
        self._heldout = self._corpus.heldout_windows(max(1, train.eval_prompts), task.made.context)
        self._model = _model(task, target)
        self._optimizer = make_optimizer(self._model, train.optimizer)
        self._stepper = Stepper(self._model, self._optimizer, train.optimizer.max_grad_norm)
        self._checkpointing = choose_checkpointing(train.gradient_checkpointing)
        self._windows = _batches(self._corpus, task)
        limit = parse_size(train.memory_limit) if train.memory_limit else None
        self._device = Device(target.device, utilization=1.0, limit_bytes=limit)
        self._fit = Fit(self._device)
        self._predict(target)
        self._first_pass()
        if limit is not None:
            limited.enter_context(self._device.capped())
        if task.compile:
            self._model.base_model.compile()

    def _predict(self, target: Target) -> None:
        """What an update will hold, said before the first one: also where that runs out of memory."""
        size = Size(self._task.rows, self._task.made.context)
        try:
            added = added_bytes(
                target, size.rows, size.tokens, checkpointing=self._checkpointing, lora=self._task.train.lora
            )
            self._fit.see("learn", size, added)
        except Exception as error:  # a model that only real tensors run
            logger.debug("an update is not traced: {}", error)
            return
        line = {
            "phase": "learn", "rows": size.rows, "tokens": size.tokens,
            "predicted_bytes": int(self._fit.predict("learn", size)), "added_bytes": None,
            "process_bytes": self._device.read().reserved_bytes, "seconds": 0.0, "retries": 0, "reason": None,
        }  # fmt: skip
        self._tracker.log_memory(0, [[line]])

    def _first_pass(self) -> None:
        """Take a gradient and drop it, so that threads and kernels are there before memory is limited."""
        accumulate_lm(self._model, self._heldout[:1], dtype=self._dtype, rows=1)
        self._model.zero_grad(set_to_none=True)

    def update(self, number: int) -> None:
        task, start = self._task, time.perf_counter()
        rate = learning_rate(number - 1, task.train.steps, task.train.optimizer)
        set_learning_rate(self._optimizer, rate)
        windows = next(self._windows)
        with self._fit.watch("learn", Size(task.rows, task.made.context)):
            metrics = self._stepper.step(
                lambda: accumulate_lm(
                    self._model, windows, dtype=self._dtype, rows=task.rows,
                    checkpointing=self._checkpointing,
                )
            )  # fmt: skip
        tokens = number * task.batch_size * task.made.context
        seconds = time.perf_counter() - start
        memory = self._device.read().as_metrics()
        line = {"num_tokens": tokens, **metrics, "learning_rate": rate, **memory, "step_time": seconds}
        self._tracker.log(number, line)
        self._tracker.log_memory(number, [[each.as_dict() for each in self._fit.take_passes()]])

    def evaluate(self, number: int) -> None:
        losses = heldout_losses(self._model, self._heldout, dtype=self._dtype, rows=EVAL_ROWS)
        mean = losses.mean().item()
        if not math.isfinite(mean) or (number and self._stepper.num_skipped == number):
            raise FloatingPointError(f"after {number} updates the held-out loss is {mean}")
        self._tracker.log(number, {"eval_loss": mean})
        write_whole(self._folder / HELDOUT_FILE, json.dumps({"step": number, "values": losses.tolist()}))


def _model(task: Task, target: Target) -> PreTrainedModel:
    """A named model with its own weights, or one from numbers with random ones."""
    if task.made.arch is not None:
        return random_model(task.made.config(), target, seed=task.train.seed)
    model = load_for(target, model_name(task.train, task.made)).model
    if task.train.lora.on:
        add_adapters(model, task.train.lora)
        store_base(model, target.dtype)
    return model


def _batches(corpus: Corpus, task: Task) -> Iterator[Tensor]:
    """The same windows in the same order for a seed, cut into batches."""
    generator = torch.Generator().manual_seed(task.train.seed)
    while True:
        yield corpus.train_windows(task.batch_size, task.made.context, generator)


def _say_settings(task: Task, folder: Path) -> None:
    """As a run does: flat."""
    values = task.as_json()
    flat = {**values.pop("train"), **values.pop("made"), **values}
    write_whole(folder / CONFIG_FILE, yaml.safe_dump(flat, sort_keys=False))
