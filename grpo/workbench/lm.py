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
    target = make_target(model_shape(task), choose_device(task.device), task.precision)
    corpus, generator = open_corpus(task), torch.Generator().manual_seed(task.seed)
    heldout = corpus.heldout_windows(max(1, task.eval_prompts), task.context)
    model = load_model(task, target)
    low_bits = {} if task.uses_lora else split_masters(model, target.dtype)
    optimizer = make_optimizer(model, task, low_bits)
    loss_scale = LossScale() if target.dtype == torch.float16 else None
    guarded = GuardedOptimizer(
        model, optimizer, task.max_grad_norm, loss_scale=loss_scale, remedy="lower --learning-rate"
    )
    checkpointing = choose_checkpointing(task.gradient_checkpointing)
    learn = partial(
        accumulate_lm,
        model,
        dtype=target.dtype,
        rows=task.rows,
        checkpointing=checkpointing,
        loss_scale=loss_scale,
    )
    limit = parse_size(task.memory_limit) if task.memory_limit else None
    device = Device(target.device, utilization=1.0, limit_bytes=limit)
    predicted = _predicted(task, target)

    def log_memory(step: int, peak: Peak, seconds: float) -> None:
        line = Pass(
            "learn",
            task.rows,
            task.context,
            predicted,
            peak.added_bytes,
            peak.process_bytes,
            seconds,
            0,
            None,
            [],
        )
        tracker.log_memory(step, [[line.as_dict()]])

    def evaluate(step: int) -> None:
        losses = heldout_losses(model, heldout, dtype=target.dtype, rows=EVAL_ROWS)
        mean = losses.mean().item()
        if not math.isfinite(mean) or (step and guarded.num_skipped == step):
            raise FloatingPointError(f"after {step} updates the held-out loss is {mean}")
        tracker.log(step, {"eval_loss": mean})
        write_whole(folder / HELDOUT_FILE, json.dumps({"step": step, "values": losses.tolist()}))

    with ExitStack() as stack:
        tracker = RunTracker(folder, trackers=(), settings={}, before_step=-1)
        stack.callback(tracker.close)
        log_memory(0, Peak(process_bytes=device.used_bytes()), 0.0)  # the first update may not fit
        learn(heldout[:1])  # and drop it: threads and kernels are there before memory is limited
        model.zero_grad(set_to_none=True)
        if limit is not None:
            stack.enter_context(device.capped())
        if task.compile:
            model.base_model.compile()
        if task.eval_interval:
            evaluate(0)
        for step in range(1, task.steps + 1):
            start = time.perf_counter()
            rate = learning_rate(step - 1, task.steps, task)
            set_learning_rate(optimizer, rate)
            # The same windows in the same order for a seed, however they are cut into batches.
            windows = corpus.train_windows(task.num_rows, task.context, generator)
            with device.measure(exact=step == 1) as peak:
                metrics = guarded.step(partial(learn, windows))
            seconds, num_tokens = time.perf_counter() - start, step * task.num_rows * task.context
            known = {"num_tokens": num_tokens, "learning_rate": rate, "step_time": seconds}
            tracker.log(step, {**known, **metrics, **device.read().as_metrics()})
            log_memory(step, peak, seconds)
            if task.eval_interval and (step == task.steps or step % task.eval_interval == 0):
                evaluate(step)


def _predicted(task: Task, target: Target) -> int | None:
    """Bytes that tensors of an update will add; None of a model that only real tensors run."""
    checkpointing = choose_checkpointing(task.gradient_checkpointing)
    try:
        return added_bytes(target, PassSize(task.rows, task.context), checkpointing=checkpointing, lora=task)
    except Exception as error:
        logger.debug("an update is not traced: {}", error)
        return None
