"""What is learned, as "accumulate gradients over micro-batches"."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.config.groups import Checkpointing, LossSettings, LossType
from grpo.learning.loss import StepCounts, Tokens, token_loss, token_weights
from grpo.learning.metrics import finish_metrics, loss_metrics, merge_metrics
from grpo.learning.step import begin_gradients
from grpo.scoring.logprobs import token_logprobs
from grpo.scoring.stream import Stream, streams
from grpo.types import Rollout

Sums = dict[str, Tensor]
"""Sums, least and largest values over rows, as `merge_metrics` puts them together; empty without rows."""
_GAP = "sampling/sampling_logp_difference"
"""Between sampler and scorer, by TRL's name."""


@dataclass(frozen=True)
class GRPOBatch:
    """Everything the loss of one step depends on, frozen before the first backward pass.

    Of the rows that this process learns from; `counts` are of the whole step. advantages: (N,) or (N, C).
    old_logp, ref_logp: (N, C) or None. mask: (N, C) tokens that are learned from.
    """

    rollout: Rollout
    advantages: Tensor
    mask: Tensor
    counts: StepCounts
    old_logp: Tensor | None = None
    ref_logp: Tensor | None = None

    def without_zero_variance_groups(self) -> "GRPOBatch":
        """Only groups in which something has an advantage: without a KL the others have no gradient.

        `counts` stay those of the whole step, and so does the gradient. Of groups of which none has any, the
        first stays: something has to be measured.
        """
        if not self.rollout.prompts:
            return self
        taught = (self.advantages != 0).view(len(self.rollout.prompts), -1).any(1)  # (B,)
        if taught.all():
            return self
        groups = taught.nonzero().flatten() if taught.any() else torch.zeros(1, dtype=torch.long)
        size = self.rollout.group_size
        rows = (groups.unsqueeze(1) * size + torch.arange(size)).flatten()
        by_row = {name: getattr(self, name) for name in ("advantages", "mask", "old_logp", "ref_logp")}
        chosen = {name: values[rows] for name, values in by_row.items() if values is not None}
        return replace(self, rollout=self.rollout.groups(groups.tolist()), **chosen)

    def tokens(self, stream: Stream, loss_type: LossType, dtype: torch.dtype) -> Tokens:
        """Those of a stream, which are learned from; numbers in `dtype`."""
        rows = stream.rows
        at = rows[stream.row], stream.place

        def learned(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[at].to(dtype)

        weights = token_weights(self.mask[rows].sum(1), self.counts, loss_type)  # (R,)
        advantages = self.advantages[at[0]] if self.advantages.ndim == 1 else self.advantages[at]
        return Tokens(
            num_rows=len(rows), row=stream.row, weight=weights[stream.row].to(dtype),
            advantage=advantages.to(dtype),
            old_logp=learned(self.old_logp), ref_logp=learned(self.ref_logp),
            sampler_logp=self.rollout.sampler_logp[at],
        )  # fmt: skip


def accumulate_grpo(
    model: PreTrainedModel,
    batch: GRPOBatch,
    *,
    settings: LossSettings,
    temperature: float,
    dtype: torch.dtype,
    rows: int,
    longest: tuple[int, int] | None = None,
    of_equal_rows: bool = False,
    importance_cap: float | None = None,
    checkpointing: Checkpointing = "none",
) -> Sums:
    """Add the step's gradient to the parameters' `.grad`, in the parts that `streams` makes.

    The split changes nothing (invariance I1), nor does `checkpointing`: what the backward pass
    computes again to save memory. Returns what `finish_grpo` makes metrics of.
    """
    device = model.device
    exact = torch.float32 if device.type == "mps" else torch.float64  # which MPS does not have
    sums: Sums = {}
    begin_gradients(model)
    for stream in streams(batch.rollout, rows, mask=batch.mask, longest=longest, of_equal_rows=of_equal_rows):
        tokens = batch.tokens(stream, settings.loss_type, torch.promote_types(model.dtype, torch.float32))
        stream, tokens = to_device_together(stream, tokens, device)
        metrics = learn_tokens(
            model, stream, tokens, settings=settings, temperature=temperature, dtype=dtype,
            importance_cap=importance_cap, checkpointing=checkpointing,
        )  # fmt: skip
        sums = merge_metrics(sums, {name: value.to(exact) for name, value in metrics.items()})
    return dict(zip(sums, torch.stack(list(sums.values())).cpu(), strict=True))


def to_device_together(stream: Stream, tokens: Tokens, device: torch.device) -> tuple[Stream, Tokens]:
    """Both on a device, in one copy."""
    names = tokens.tensors()
    stream, moved = stream.to(device, *names.values())
    return stream, tokens.with_tensors(dict(zip(names, moved, strict=True)))


def learn_tokens(
    model: PreTrainedModel,
    stream: Stream,
    tokens: Tokens,
    *,
    settings: LossSettings,
    temperature: float,
    dtype: torch.dtype,
    importance_cap: float | None = None,
    checkpointing: Checkpointing = "none",
    traced: torch.device | None = None,
) -> Sums:
    """Add a stream's share of the step's gradient to `.grad`; its share of the metrics.

    tokens: those of the stream. traced: the device whose memory a trace is of.
    """
    loss = partial(token_loss, settings=settings, importance_cap=importance_cap)

    def slope(logp: Tensor, part: slice) -> Tensor:
        with torch.enable_grad():
            leaf = logp.detach().requires_grad_()
            return torch.autograd.grad(loss(leaf, tokens.part(part))[0].sum(), leaf)[0]

    logp, entropy = token_logprobs(
        model, stream, temperature=temperature, dtype=dtype, entropy=True, slope=slope,
        per_token=settings.is_per_token, checkpointing=checkpointing, traced=traced,
    )  # (K,)  # fmt: skip
    with torch.no_grad():
        losses, ratios = loss(logp, tokens)
        gap = (logp - tokens.sampler_logp).abs()
        return {
            **loss_metrics(ratios, tokens, settings),
            "loss": losses.sum(), "entropy": entropy.sum(), f"{_GAP}/mean": gap.sum(),
            f"{_GAP}/max": torch.cat([gap, gap.new_zeros(1)]).max(),
        }  # fmt: skip


def finish_grpo(parts: Sequence[Sums], counts: StepCounts) -> dict[str, float]:
    """A step's metrics from what `accumulate_grpo` returned, in each process or in one.

    The loss, and of the tokens that were learned from: the entropy in nats, the difference between sampler
    and scorer in log-prob, and the metrics of `loss_metrics`.
    """
    sums = reduce(merge_metrics, parts, Sums())
    metrics = {name: sums.pop(name).item() for name in ("loss", "entropy", f"{_GAP}/mean", f"{_GAP}/max")}
    for name in ("entropy", f"{_GAP}/mean"):
        metrics[name] /= max(sums["tokens"].item(), 1)
    return metrics | (finish_metrics(sums) if counts.tokens else {})
