"""Plain language modelling, which the workbench compares with: learning from windows of text.

A run of it writes the files that a run of the trainer writes. Left out: checkpoints, and the last batch where
it would not be full.
"""

import json
import math
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from grpo.config import CONFIG_FILE, Config, write_yaml
from grpo.config.groups import Checkpointing, LoraSettings
from grpo.config.sizes import parse_size
from grpo.files import write_whole
from grpo.learning.loss_scale import LossScale
from grpo.learning.masters import split_masters
from grpo.learning.optimizer import learning_rate, make_optimizer, set_learning_rate
from grpo.learning.step import GuardedOptimizer, begin_gradients
from grpo.logs.tracking import RunTracker
from grpo.memory import Device, Pass, PassSize
from grpo.memory.device import Peak
from grpo.model.activation_checkpointing import choose_checkpointing, recomputed_layers
from grpo.model.head import LogitRule
from grpo.model.numerics import computing_in
from grpo.model.target import Target, choose_device, make_target
from grpo.model.ways import layers_with_window
from grpo.plan.phase_probe import PhaseProbe
from grpo.plan.trace import TracedPhases
from grpo.plan.workload import Workload
from grpo.scoring.head import LogpGradFn, chunked_lm_head
from grpo.workbench.corpus import open_corpus
from grpo.workbench.models import load_model, model_shape
from grpo.workbench.settings import Task
from grpo.workbench.sizes import HELDOUT_FILE

WHOLE = LoraSettings()
"""All weights are trained."""
EVAL_ROWS = 8
"""Held-out windows at once: their memory must not be what decides whether a small batch fits."""


class _ForgetfulLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not typed
    def __init__(self, is_sliding: bool) -> None:
        super().__init__()
        self.is_sliding = is_sliding

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def _forgetful_cache(model: PreTrainedModel) -> Cache:
    """A cache that remembers nothing, for texts that go through in one piece.

    Without any, transformers looks into the positions for packed texts, which waits for an accelerator, and
    takes fake tensors for packed.
    """
    return Cache([_ForgetfulLayer(is_sliding) for is_sliding in layers_with_window(model.config)])


def window_logprobs(
    model: PreTrainedModel,
    windows: Tensor,
    *,
    dtype: torch.dtype,
    slope: LogpGradFn | None = None,
    traced: torch.device | None = None,
) -> Tensor:
    """Log-probs (R, T) of each token but the first of `windows` (R, T + 1), in nats.

    slope: see `chunked_lm_head`; with it gradients are added to the parameters'. traced: the device whose
    memory a trace is of.
    """
    windows = windows.to(model.device)
    with computing_in(dtype, model.device), torch.set_grad_enabled(slope is not None):
        hidden = model.base_model(
            input_ids=windows[:, :-1], past_key_values=_forgetful_cache(model), use_cache=True
        ).last_hidden_state  # (R, T, D)
        head = model.get_output_embeddings()
        hidden, targets = hidden.flatten(0, 1), windows[:, 1:].flatten()
        result = chunked_lm_head(
            hidden.detach(),
            head.weight,
            targets,
            bias=head.bias,
            rule=LogitRule.of(model.config),
            slope=slope,
            device=traced,
        )
    if result.hidden_gradient is not None:
        hidden.backward(result.hidden_gradient)
    return result.logp.view(windows[:, 1:].shape)


def accumulate_lm(
    model: PreTrainedModel,
    windows: Tensor,
    *,
    dtype: torch.dtype,
    rows: int,
    checkpointing: Checkpointing = "none",
    loss_scale: LossScale | None = None,
) -> dict[str, float]:
    """Adds the gradient of the mean loss over `windows` (N, T + 1), and returns that loss, in nats a token.

    Every token but a window's first is predicted. The split into `rows` at a time changes nothing. The
    gradient is multiplied by the loss scale, if there is one.
    """
    num_tokens, scale = windows[:, 1:].numel(), 1.0 if loss_scale is None else loss_scale.value
    exact = torch.float32 if model.device.type == "mps" else torch.float64

    def slope(logp: Tensor, _: slice) -> Tensor:
        return torch.full_like(logp, -scale / num_tokens)

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


class WindowPhases(PhaseProbe):
    """Learning from windows of a text, the one phase that there is."""

    def learn(self, size: PassSize) -> None:
        self.begin_gradients()
        windows, target = (
            torch.zeros(size.rows, 1 + size.completion_tokens, dtype=torch.long),
            self.work.target,
        )
        with recomputed_layers(self.policy, self.work.checkpointing):
            window_logprobs(
                self.policy, windows, dtype=target.dtype, slope=lambda logp, _: logp, traced=target.device
            )
        self.drop_gradients()


def added_bytes(
    target: Target, size: PassSize, *, checkpointing: Checkpointing = "none", lora: LoraSettings = WHOLE
) -> int:
    """Predicts the bytes that tensors of an update add, gradients among them; traced, on no device."""
    config = Config(gradient_checkpointing=checkpointing, **vars(LoraSettings.of(lora)))
    return TracedPhases(Workload(config, target, 1), WindowPhases).added_bytes("learn", size)


def train_lm(task: Task, folder: Path) -> None:
    """All updates, `task.steps` of them, into the files of a run in `folder`.

    FloatingPointError where the loss ends up not finite. Memory may run out.
    """
    write_yaml(task, folder / CONFIG_FILE)
    run = _LmRun(task, folder)
    with ExitStack() as stack:
        stack.callback(run.tracker.close)
        run.warm_up()
        if run.limit is not None:
            stack.enter_context(run.device.capped())
        if task.compile:
            run.model.base_model.compile()
        if task.eval_interval:
            run.evaluate(0)
        for step in range(1, task.steps + 1):
            run.update(step)
            if task.eval_interval and (step == task.steps or step % task.eval_interval == 0):
                run.evaluate(step)


class _LmRun:
    """The parts of a run of language modelling: data, model, optimizer, and the files that it writes."""

    def __init__(self, task: Task, folder: Path) -> None:
        target = make_target(model_shape(task), choose_device(task.device), task.precision)
        self._task, self._folder, self._dtype = task, folder, target.dtype
        self._corpus, self._generator = open_corpus(task), torch.Generator().manual_seed(task.seed)
        self._heldout = self._corpus.heldout_windows(max(1, task.eval_prompts), task.context)
        self.model = load_model(task, target)
        low_bits = {} if task.uses_lora else split_masters(self.model, target.dtype)
        self._optimizer = make_optimizer(self.model, task, low_bits)
        loss_scale = LossScale() if target.dtype == torch.float16 else None
        self._guarded = GuardedOptimizer(
            self.model,
            self._optimizer,
            task.max_grad_norm,
            loss_scale=loss_scale,
            remedy="lower --learning-rate",
        )
        self._learn = partial(
            accumulate_lm,
            self.model,
            dtype=target.dtype,
            rows=task.rows,
            checkpointing=choose_checkpointing(task.gradient_checkpointing),
            loss_scale=loss_scale,
        )
        self.limit = parse_size(task.memory_limit) if task.memory_limit else None
        self.device = Device(target.device, utilization=1.0, limit_bytes=self.limit)
        self._predicted_bytes = _predicted(task, target)
        self.tracker = RunTracker(folder, trackers=(), settings={}, before_step=-1)

    def warm_up(self) -> None:
        """Make a pass and drop it, so that threads and kernels are there before memory is limited."""
        self._log_memory(0, Peak(process_bytes=self.device.used_bytes()), 0.0)  # the first update may not fit
        self._learn(self._heldout[:1])
        self.model.zero_grad(set_to_none=True)

    def update(self, step: int) -> None:
        """One optimizer step. The windows come in the same order for a seed, whatever the batch size."""
        task, start = self._task, time.perf_counter()
        rate = learning_rate(step - 1, task.steps, task)
        set_learning_rate(self._optimizer, rate)
        windows = self._corpus.train_windows(task.num_rows, task.context, self._generator)
        with self.device.measure(exact=step == 1) as peak:
            metrics = self._guarded.step(partial(self._learn, windows))
        seconds, num_tokens = time.perf_counter() - start, step * task.num_rows * task.context
        known = {"num_tokens": num_tokens, "learning_rate": rate, "step_time": seconds}
        self.tracker.log(step, {**known, **metrics, **self.device.read().as_metrics()})
        self._log_memory(step, peak, seconds)

    def evaluate(self, step: int) -> None:
        """Held-out losses after so many updates, into the files. FloatingPointError for one not finite."""
        losses = heldout_losses(self.model, self._heldout, dtype=self._dtype, rows=EVAL_ROWS)
        mean = losses.mean().item()
        if not math.isfinite(mean) or (step and self._guarded.num_skipped == step):
            raise FloatingPointError(f"after {step} updates the held-out loss is {mean}")
        self.tracker.log(step, {"eval_loss": mean})
        write_whole(self._folder / HELDOUT_FILE, json.dumps({"step": step, "values": losses.tolist()}))

    def _log_memory(self, step: int, peak: Peak, seconds: float) -> None:
        line = Pass(
            phase="learn",
            rows=self._task.rows,
            tokens=self._task.context,
            predicted_bytes=self._predicted_bytes,
            added_bytes=peak.added_bytes,
            process_bytes=peak.process_bytes,
            seconds=seconds,
            retries=0,
            reason=None,
            kv_growth=[],
        )
        self.tracker.log_memory(step, [[line.as_dict()]])


def _predicted(task: Task, target: Target) -> int | None:
    """Bytes that tensors of an update will add; None of a model that only real tensors run."""
    checkpointing = choose_checkpointing(task.gradient_checkpointing)
    try:
        return added_bytes(target, PassSize(task.rows, task.context), checkpointing=checkpointing, lora=task)
    except Exception as error:
        logger.debug("an update is not traced: {}", error)
        return None
