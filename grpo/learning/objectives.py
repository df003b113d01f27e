"""The gradient of a step, added up over streams."""

from collections.abc import Iterable, Sequence
from functools import partial, reduce
from typing import NotRequired, Unpack

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.config.groups import Checkpointing, LossSettings
from grpo.learning.loss import StepCounts, Tokens, token_loss, token_weights
from grpo.learning.metrics import finish_metrics, loss_metrics, merge_metrics
from grpo.learning.step import begin_gradients
from grpo.scoring.logprobs import ScoringOptions, token_logprobs
from grpo.scoring.packing import streams
from grpo.scoring.stream import Stream
from grpo.types import Batch

Sums = dict[str, Tensor]
"""Sums, least and largest values over rows, as `merge_metrics` puts them together; empty without rows."""
_GAP = "sampling/sampling_logp_difference"
"""Between sampler and scorer, by TRL's name."""


def with_advantage(batch: Batch) -> Batch:
    """Keeps the groups in which something has an advantage: without a KL the others have no gradient.

    The step's counts stay what they are, and so does the gradient. Of groups of which none has any, the first
    stays: something has to be measured.
    """
    assert batch.credit is not None
    taught = batch.sum_by_row((batch.credit != 0).long()).view(len(batch.prompts), -1).any(1)  # (B,)
    if taught.all():
        return batch
    return batch.select_groups(taught.nonzero().flatten().tolist() or [0])


def tokens_of(stream: Stream, batch: Batch, weights: Tensor, dtype: torch.dtype) -> Tokens:
    """Picks what the loss has to know of a stream's tokens, in `dtype`. weights: (K,) of the batch's."""
    assert batch.credit is not None
    at = stream.tokens

    def known(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[at].to(dtype)

    return Tokens(
        num_rows=stream.num_rows,
        row=stream.row,
        weight=weights[at].to(dtype),
        advantage=batch.credit[at].to(dtype),
        sampler_logp=batch.sampler_logp[at],
        old_logp=known(batch.old_logp),
        ref_logp=known(batch.ref_logp),
    )


class LearningOptions(ScoringOptions):
    """How gradients are computed, see `learn_tokens`."""

    settings: LossSettings
    importance_cap: NotRequired[float | None]
    checkpointing: NotRequired[Checkpointing]


def accumulate_grpo(
    model: PreTrainedModel,
    batch: Batch,
    counts: StepCounts,
    *,
    rows: int,
    longest: tuple[int, int] | None = None,
    of_equal_rows: bool = False,
    loss_scale: float = 1.0,
    **options: Unpack[LearningOptions],
) -> Sums:
    """Adds a step's gradient to the parameters' `.grad`, in the parts that `streams` makes of a batch.

    The split changes nothing (invariance I1), nor does `checkpointing`: what the backward pass
    computes again to save memory. batch: with credit. counts: of the whole step, of which the batch may be a
    share. Returns what `finish_grpo` makes metrics of.
    """
    parts = streams(batch, rows, scored=batch.learned, longest=longest, of_equal_rows=of_equal_rows)
    return accumulate_streams(model, batch, parts, counts, loss_scale=loss_scale, **options)


def accumulate_streams(
    model: PreTrainedModel,
    batch: Batch,
    parts: Iterable[Stream],
    counts: StepCounts,
    *,
    loss_scale: float = 1.0,
    **options: Unpack[LearningOptions],
) -> Sums:
    """Does what `accumulate_grpo` does, with a batch that comes in these streams."""
    device = model.device
    exact = torch.float32 if device.type == "mps" else torch.float64  # which MPS does not have
    loss_dtype = torch.promote_types(model.dtype, torch.float32)
    sums: Sums = {}
    begin_gradients(model)
    row_tokens = batch.sum_by_row(batch.learned.long())  # (N,)
    weights = token_weights(row_tokens, counts, options["settings"].loss_type)[batch.row]  # (K,)
    for stream in parts:
        stream, tokens = to_device_together(stream, tokens_of(stream, batch, weights, loss_dtype), device)
        metrics = learn_tokens(model, stream, tokens, loss_scale=loss_scale, **options)
        sums = merge_metrics(sums, {name: value.to(exact) for name, value in metrics.items()})
    return dict(zip(sums, torch.stack(list(sums.values())).cpu(), strict=True))


def to_device_together(stream: Stream, tokens: Tokens, device: torch.device) -> tuple[Stream, Tokens]:
    """Copies both to a device, in one transfer."""
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
    fp32_logits: bool = False,
    checkpointing: Checkpointing = "none",
    loss_scale: float = 1.0,
    traced: torch.device | None = None,
) -> Sums:
    """Adds a stream's share of the step's gradient to `.grad`; its share of the metrics.

    tokens: those of the stream. loss_scale: what the gradient is multiplied by, see `LossScale`. traced: the
    device whose memory a trace is of.
    """
    loss = partial(token_loss, settings=settings, importance_cap=importance_cap)

    def slope(logp: Tensor, part: slice) -> Tensor:
        with torch.enable_grad():
            leaf = logp.detach().requires_grad_()
            return loss_scale * torch.autograd.grad(loss(leaf, tokens.part(part))[0].sum(), leaf)[0]

    logp, entropy = token_logprobs(
        model,
        stream,
        temperature=temperature,
        dtype=dtype,
        fp32_logits=fp32_logits,
        entropy=True,
        slope=slope,
        per_token=settings.is_per_token,
        checkpointing=checkpointing,
        traced=traced,
    )  # (K,)
    with torch.no_grad():
        losses, ratios = loss(logp, tokens)
        gap = (logp - tokens.sampler_logp).abs()
        return {
            **loss_metrics(ratios, tokens, settings),
            "loss": losses.sum(),
            "entropy": entropy.sum(),
            f"{_GAP}/mean": gap.sum(),
            f"{_GAP}/max": torch.cat([gap, gap.new_zeros(1)]).max(),
        }


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
