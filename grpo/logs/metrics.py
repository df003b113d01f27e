"""A step's numbers by TRL's names."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo.data.reward_functions import Scores
from grpo.learning.advantages import zero_variance_groups
from grpo.types import Batch

MANY_CUT, MANY_EQUAL = 0.5, 0.75
"""Shares of a step's completions that are cut, and of its groups without a difference, that are told."""


def length_metrics(scores: Scores) -> dict[str, float]:
    """Lengths in tokens; `clipped_ratio` is the share of completions cut at max_new_tokens."""
    ended = scores.lengths[scores.terminated]
    metrics = {"completions/clipped_ratio": 1 - scores.terminated.float().mean().item()}
    for kind, lengths in (("", scores.lengths), ("_terminated", ended if len(ended) else torch.zeros(1))):
        for statistic in ("mean", "min", "max"):
            value = getattr(lengths.float(), statistic)().item()
            metrics[f"completions/{statistic}{kind}_length"] = value
    return metrics


def reward_metrics(scores: Scores, group_size: int) -> dict[str, float]:
    """Returns means and deviations of rewards, by function and component, and what functions have logged.

    `reward_std` is the deviation of all rewards, as TRL has it; `reward_std_within_groups` is the mean of the
    groups' own, which is what advantages are made of.
    """
    rewards = scores.rewards
    metrics = {
        **{name: sum(values) / len(values) for name, values in scores.metrics.items()},
        "reward": rewards.mean().item(),
        "reward_std": rewards.std().item(),
        "reward_std_within_groups": rewards.view(-1, group_size).std(1).mean().item(),
        "frac_reward_zero_std": zero_variance_groups(rewards, group_size).double().mean().item(),
    }
    columns = dict(zip(scores.names, scores.table.T, strict=True))
    for name in sorted({name for row in scores.components for name in row}):
        columns[name] = torch.tensor([row.get(name, torch.nan) for row in scores.components])
    for name, values in columns.items():
        values = values[~values.isnan()]
        if len(values):
            metrics[f"rewards/{name}/mean"] = values.mean().item()
            metrics[f"rewards/{name}/std"] = values.std(correction=min(1, len(values) - 1)).item()
    return metrics


def warnings_of(
    step: int, metrics: Mapping[str, float], *, num_rows: int, max_new_tokens: int, ends: Sequence[str]
) -> dict[str, str]:
    """Returns what a person should know of a step's metrics, by kind. ends: names of what ends a text."""
    warnings = {}
    if (share := metrics["frac_reward_zero_std"]) >= MANY_EQUAL:
        warnings["equal"] = (
            f"{share:.0%} of the groups of step {step} have rewards without a difference, from which "
            "nothing is learned: give easier prompts, a reward with steps between wrong and right, a larger "
            "--group-size or --temperature, or --refill-groups"
        )
    num_cut = round(metrics["completions/clipped_ratio"] * num_rows)
    if num_cut >= MANY_CUT * num_rows:
        warnings["cut"] = (
            f"{num_cut} of {num_rows} completions of step {step} were cut at max_new_tokens "
            f"{max_new_tokens}: raise it, or nothing ends; what would: {', '.join(ends)}"
        )
    return warnings


def chosen_rows(count: int, num_rows: int, *, first: int = 0) -> list[int]:
    """Chooses about `count` rows of a step, evenly over its groups from row `first` on."""
    count = min(count, num_rows)
    return [(first + index * num_rows // count) % num_rows for index in range(count)]


def completion_records(
    batch: Batch, first_row: int, scores: Scores, advantages: Tensor, chosen: Sequence[int]
) -> list[dict[str, Any]]:
    """Returns the chosen rows of a step that a batch has, with their rewards.

    first_row: the step's row that is the batch's first. scores, advantages: of the whole step.
    """
    prompts, records = batch.row_prompts, []
    for row in chosen:
        own = row - first_row
        if not 0 <= own < len(batch):
            continue
        rewards = dict(zip(scores.names, scores.table[row].tolist(), strict=True))
        records.append(
            {
                "row": row,
                "prompt_id": prompts[own].id,
                "prompt": prompts[own].text,
                **({"messages": prompts[own].messages} if prompts[own].messages else {}),
                "completion": batch.texts[own],
                "num_tokens": int(batch.lengths[own]),
                "terminated": bool(batch.terminated[own]),
                "rewards": {name: value for name, value in rewards.items() if value == value},
                "components": scores.components[row],
                **({"extra": scores.extra[row]} if scores.extra[row] else {}),
                "advantage": advantages[row].item(),
            }
        )
    return records
