"""What is learned, as "accumulate gradients over micro-batches"."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.config.groups import Checkpointing
from grpo.learning.loss import (
    LossSettings,
    StepCounts,
    finish_metrics,
    grpo_loss,
    merge_metrics,
    truncated_importance_weights,
)
from grpo.learning.noise import part_of
from grpo.learning.step import begin_gradients
from grpo.scoring.micro_batches import micro_batch_logprobs, micro_batches
from grpo.types import Rollout

Sums = dict[str, Tensor]
"""Sums, least and largest values over rows, as `merge_metrics` puts them together; empty without rows."""


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

    def without_dull_groups(self) -> "GRPOBatch":
        """Only groups in which something has an advantage: without a KL the others have no gradient.

        `counts` stay those of the whole step, and so does the gradient. Of groups of which none has any, the
        first is kept: something has to be measured.
        """
        taught = (self.advantages != 0).view(len(self.rollout.prompts), -1).any(1)  # (B,)
        if taught.all() or not self.rollout.prompts:
            return self
        kept = taught.nonzero().flatten() if taught.any() else torch.zeros(1, dtype=torch.long)
        size = self.rollout.group_size
        rows = (kept.unsqueeze(1) * size + torch.arange(size)).flatten()

        def part(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows]

        joined = Rollout.join([self.rollout.one_group(group) for group in kept.tolist()])
        return GRPOBatch(
            joined,
            self.advantages[rows],
            self.mask[rows],
            self.counts,
            part(self.old_logp),
            part(self.ref_logp),
        )  # fmt: skip

    def of_rows(self, rows: Tensor, width: int) -> dict[str, Tensor | None]:
        """What is known of these rows' first `width` tokens: (R, width), or advantages of whole rows (R,).

        own: the tokens that are theirs; mask: those of them that are learned from.
        """
        rollout, advantages = self.rollout, self.advantages[rows]
        known = {
            "sampler_logp": rollout.sampler_logp, "own": rollout.mask, "mask": self.mask,
            "old_logp": self.old_logp, "ref_logp": self.ref_logp,
        }  # fmt: skip
        return {
            "advantages": advantages if advantages.ndim == 1 else advantages[:, :width],
            **{name: None if each is None else each[rows, :width] for name, each in known.items()},
        }


def accumulate_grpo(
    model: PreTrainedModel,
    batch: GRPOBatch,
    *,
    settings: LossSettings,
    temperature: float,
    dtype: torch.dtype,
    rows: int,
    pass_tokens: int | None = None,
    importance_cap: float | None = None,
    checkpointing: Checkpointing = "none",
    noise_share: float | None = None,
) -> Sums:
    """Add the step's gradient to the parameters' `.grad`, in the parts that `micro_batches` makes.

    The split changes nothing (invariance I1), nor does `checkpointing`: what the backward pass
    computes again to save memory. Returns what `finish_grpo` makes metrics of.

    noise_share: of the step's groups that are here. Then the noise of the gradient can be told: of a step
    that is all here from its first half, else from what each process has. None: it is not asked for.
    """
    device = model.device
    exact = torch.float32 if device.type == "mps" else torch.float64  # which MPS does not have
    sums: Sums = {}
    noise: Sums = {}
    begin_gradients(model)

    halves, num_groups, done = noise_share == 1, len(batch.rollout.prompts), 0
    half = -(-num_groups // 2) * batch.rollout.group_size  # rows of every other group
    for micro in micro_batches(batch.rollout, rows, pass_tokens=pass_tokens, halves=halves):
        micro, given = micro.to(device, batch.of_rows(micro.rows, micro.completion_ids.shape[1]))
        share = partial(_share, given, batch.counts, settings, importance_cap)
        logp, entropy = micro_batch_logprobs(
            model, micro, temperature=temperature, dtype=dtype, entropy=True, checkpointing=checkpointing,
            loss=partial(_loss_alone, share) if settings.is_per_token else None,
        )  # (R, C)  # fmt: skip
        loss, metrics = share(logp)
        loss.backward()  # type: ignore[no-untyped-call]

        own, mask = given["own"], given["mask"]
        gap = (logp.detach() - given["sampler_logp"]).abs() * own
        metrics |= {"loss": loss.detach(), "gap": gap.sum(), "gap_max": gap.max(), "gap_tokens": own.sum()}
        if entropy is not None:
            metrics["entropy"] = (entropy * mask).sum()
        done += len(micro.rows)
        if halves and done == half < len(batch.mask):
            noise = part_of(model, half / len(batch.mask))
        sums = merge_metrics(sums, {name: value.to(exact) for name, value in metrics.items()})
    if noise_share is not None and not halves:
        noise = part_of(model, noise_share)
    sums |= {name: value.to(exact) for name, value in noise.items()}
    return dict(zip(sums, torch.stack(list(sums.values())).cpu(), strict=True))


def _share(
    given: Mapping[str, Tensor],
    counts: StepCounts,
    settings: LossSettings,
    importance_cap: float | None,
    logp: Tensor,
    *,
    measured: bool = True,
) -> tuple[Tensor, Sums]:
    """A micro-batch's share of the step's loss and of its metrics. given: see `GRPOBatch.of_rows`."""
    old_logp, mask, weights = given.get("old_logp"), given["mask"], None
    if importance_cap is not None:
        scored = logp.detach() if old_logp is None else old_logp
        weights = truncated_importance_weights(scored, given["sampler_logp"], mask, cap=importance_cap)
    return grpo_loss(
        logp, old_logp, given.get("ref_logp"), given["advantages"].to(logp.dtype), mask,
        counts=counts, settings=settings, importance_weights=weights, measured=measured,
    )  # fmt: skip


def _loss_alone(share: Callable[..., tuple[Tensor, Sums]], logp: Tensor) -> Tensor:
    return share(logp, measured=False)[0]


def finish_grpo(parts: Sequence[Sums], counts: StepCounts) -> dict[str, float]:
    """A step's metrics from what `accumulate_grpo` returned, in each process or in one.

    The loss, and of the rows that were learned from: the entropy in nats a token, the difference between
    sampler and scorer in log-prob over all their tokens, masked or not, and the metrics of `grpo_loss`. Those
    under `part/` are for `NoiseScale`.
    """
    sums: Sums = {}
    for part in parts:
        sums = merge_metrics(sums, part)
    loss, entropy, tokens = sums.pop("loss").item(), sums.pop("entropy").item(), sums["tokens"].item()
    gap, gap_max, gap_tokens = (sums.pop(name).item() for name in ("gap", "gap_max", "gap_tokens"))
    noise = {name: sums.pop(name).item() for name in [*sums] if name.startswith("part/")}
    return {
        **noise,
        "loss": loss,
        "entropy": entropy / max(tokens, 1),
        "sampling/sampling_logp_difference/mean": gap / max(gap_tokens, 1),
        "sampling/sampling_logp_difference/max": gap_max,
        **(finish_metrics(sums) if counts.tokens else {}),
    }
