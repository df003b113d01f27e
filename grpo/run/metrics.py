"""A step's numbers by TRL's names."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from grpo.data.reward_functions import Scores
from grpo.learning.advantages import zero_variance_groups
from grpo.types import Rollout

MANY_CUT = 0.9
"""Share of a step's completions that are cut of which a run is warned."""


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """Lengths in tokens; `clipped_ratio` is the share of completions cut at max_new_tokens."""
    lengths, ended = rollout.lengths.float(), rollout.lengths[rollout.terminated].float()
    if len(ended) == 0:
        ended = torch.zeros(1)
    return {
        "completions/mean_length": lengths.mean().item(),
        "completions/min_length": lengths.min().item(),
        "completions/max_length": lengths.max().item(),
        "completions/mean_terminated_length": ended.mean().item(),
        "completions/min_terminated_length": ended.min().item(),
        "completions/max_terminated_length": ended.max().item(),
        "completions/clipped_ratio": 1 - rollout.terminated.float().mean().item(),
    }


def reward_metrics(scores: Scores, group_size: int) -> dict[str, float]:
    """Means and deviations by function and component; `reward_std` is the mean over groups.

    And the means of what the functions have logged themselves.
    """
    rewards = scores.rewards
    metrics = {
        **{name: sum(values) / len(values) for name, values in scores.metrics.items()},
        "reward": rewards.mean().item(),
        "reward_std": rewards.view(-1, group_size).std(1).mean().item(),
        "frac_reward_zero_std": zero_variance_groups(rewards, group_size).double().mean().item(),
    }
    by_name = dict(zip(scores.names, scores.table.T, strict=True))
    for name in sorted({name for row in scores.components for name in row}):
        by_name[name] = torch.tensor([row.get(name, torch.nan) for row in scores.components])
    for name, values in by_name.items():
        values = values[~values.isnan()]
        if len(values):
            metrics[f"rewards/{name}/mean"] = values.mean().item()
            metrics[f"rewards/{name}/std"] = values.std(correction=0).item()
    return metrics


@dataclass
class Doubts:
    """Says once a run that a step's rewards are all the same, and once that nearly all of it was cut."""

    num_rows: int
    max_new_tokens: int
    ends: Sequence[str]
    """What ends a completion."""
    equal = cut = False
    """Whether that has been said."""

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Look at a step's metrics."""
        if metrics["frac_reward_zero_std"] == 1 and not self.equal:
            self.equal = True
            logger.warning(
                "no group of step {} has rewards that differ: nothing is learned from rewards; see --reward "
                "and --temperature", step,
            )  # fmt: skip
        num_cut = round(metrics["completions/clipped_ratio"] * self.num_rows)
        if num_cut >= MANY_CUT * self.num_rows and not self.cut:
            self.cut = True
            logger.warning(
                "{} of {} completions of step {} were cut at max_new_tokens {}: raise it, or nothing ends; "
                "what would: {}", num_cut, self.num_rows, step, self.max_new_tokens, ", ".join(self.ends),
            )  # fmt: skip


def completion_records(
    rollout: Rollout, scores: Scores, advantages: Tensor, count: int, *, first: int = 0
) -> Iterator[dict[str, Any]]:
    """About `count` completions of a step, evenly over its groups from row `first` on, and what was said."""
    prompts = rollout.row_prompts
    num_rows = len(prompts)
    for index in range(min(count, num_rows)):
        row = (first + index * num_rows // min(count, num_rows)) % num_rows
        given = zip(scores.names, scores.table[row].tolist(), strict=True)
        yield {
            "row": row,
            "prompt_id": prompts[row].id,
            "prompt": prompts[row].text,
            **({"messages": prompts[row].messages} if prompts[row].messages else {}),
            "completion": rollout.completions[row],
            "num_tokens": int(rollout.lengths[row]),
            "terminated": bool(rollout.terminated[row]),
            "rewards": {name: value for name, value in given if value == value},
            "components": scores.components[row],
            **({"extra": scores.extra[row]} if scores.extra[row] else {}),
            "advantage": advantages[row].item(),
        }
