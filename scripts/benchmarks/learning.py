"""Does it learn? Held-out quality before and after, what supervised training gains instead, a picture."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch.nn.utils.rnn import pad_sequence

from grpo.config import Config, read_config
from grpo.data import load_prompts
from grpo.data.load import POSITIONS
from grpo.evaluate import Evaluation
from grpo.evaluate.quality import ROWS, Quality
from grpo.learning.loss import LossSettings, loss_counts
from grpo.learning.objectives import GRPOBatch, accumulate_grpo, finish_grpo
from grpo.learning.optimizer import make_optimizer, set_learning_rate
from grpo.learning.step import Stepper
from grpo.model.load import Policy, RolloutModel, load_policy
from grpo.model.target import choose_device
from grpo.play.match import GAMES, score_against
from grpo.play.player import Player
from grpo.run.interrupt import stop_on_signal
from grpo.run.setup import open_run
from grpo.run.tracking import METRICS_FILE, read_lines
from grpo.trainer import Trainer
from grpo.types import Prompt, Rollout
from grpo.workbench.pictures import picture

DEMO_SETTINGS = Path(__file__).parents[2] / "grpo" / "assets" / "demo.yaml"
RESAMPLES = 5_000
MARGIN = -0.02
"""A column has fallen if its change is significantly below this."""


def demo_config(**changes: Any) -> Config:
    """The demo's settings, as the bundled YAML has them, but for changes that are not None."""
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(read_config(DEMO_SETTINGS), **given)


def untrained(config: Config) -> Policy:
    return load_policy(config.model, choose_device(config.device), config.precision)


def heldout_prompts(config: Config, count: int) -> list[Prompt]:
    """Up to `count` held-out prompts of each task."""
    return load_prompts(config.prompts, seed=config.seed, heldout_count=count).heldout


def train_grpo(config: Config, console: Console) -> tuple[Path, Policy, bool]:
    """Run the trainer; its folder, the trained policy, and whether Ctrl-C cut it short."""
    with stop_on_signal() as stop, open_run(config) as run:
        Trainer(run, console).train(stop)
        return run.folder, run.policy, stop.requested


def train_supervised(config: Config, *, minutes: float, learning_rate: float = 1e-4) -> Policy:
    """Likelihood of the bundled training lines for as long as GRPO took.

    As a GRPO step: of given completions that all have an advantage of 1, and no KL.
    """
    policy, rows = untrained(config), 96
    optimizer = make_optimizer(policy.model, config.optimizer)
    set_learning_rate(optimizer, learning_rate)
    stepper, source = Stepper(policy.model, optimizer, 1.0), load_prompts("bundled", seed=config.seed)

    def accumulate() -> dict[str, float]:
        batch = _labelled(source.draw(rows), policy)
        sums = accumulate_grpo(
            policy.model, batch, settings=LossSettings(kl_coef=0.0), temperature=1.0, rows=rows,
            dtype=policy.target.dtype, pass_tokens=policy.target.pass_tokens,
        )  # fmt: skip
        return finish_grpo([sums], batch.counts)

    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        stepper.step(accumulate)
    return policy


def _labelled(prompts: list[Prompt], policy: Policy) -> GRPOBatch:
    """Bundled prompts with what comes after them in their lines, which their ids number."""
    lines = POSITIONS.joinpath("train.txt").read_text().splitlines()
    whole = [lines[int(prompt.id.rpartition(":")[2]) - 1] for prompt in prompts]
    assert all(line.startswith(prompt.text) for line, prompt in zip(whole, prompts, strict=True))
    texts = [line.removeprefix(prompt.text) for line, prompt in zip(whole, prompts, strict=True)]
    tokens = [
        torch.tensor([*each, policy.tokenizer.eos_token_id]) for each in policy.tokenizer(texts)["input_ids"]
    ]
    ids, lengths = pad_sequence(tokens, batch_first=True), torch.tensor([*map(len, tokens)])
    rollout = Rollout(
        prompts, policy.tokenizer([prompt.text for prompt in prompts])["input_ids"], ids, lengths,
        terminated=torch.ones_like(lengths, dtype=torch.bool), sampler_logp=torch.zeros(ids.shape),
        completions=texts,
    )  # fmt: skip
    return GRPOBatch(rollout, torch.ones(len(lengths)), rollout.mask, loss_counts(rollout.mask, ids.shape[1]))


def play_untrained(policy: Policy | None, other: Policy, config: Config, fens: Sequence[str]) -> Quality:
    """Column `GAMES`, in both modes: what a model scores against the untrained one from these positions.

    None: the untrained model itself, which scores a half by definition.
    """
    if policy is None:
        half = np.full((len(fens), 1), 0.5)
        even = Evaluation.of([Prompt(fen, fen, {}) for fen in fens], {GAMES: half})
        return Quality(even, even)

    def scored(temperature: float) -> Evaluation:
        settings = replace(config.sampling, temperature=temperature)
        players = [
            Player(RolloutModel(each.model, each.target.dtype).model, each.tokenizer, settings, rows=ROWS)
            for each in (policy, other)
        ]
        return score_against(*players, fens, seed=config.seed, at_once=ROWS)

    return Quality(scored(config.sampling.temperature), scored(0.0))


def seed_bootstrap(before: Evaluation, after: Sequence[Evaluation], column: str) -> np.ndarray:
    """Resampled mean changes of a column, (RESAMPLES,): seeds and prompts are both drawn anew."""
    changes = np.stack([each.scores[column] - before.scores[column] for each in after])  # (S, prompts)
    rng = np.random.default_rng(0)
    num_seeds, num_prompts = changes.shape
    drawn = rng.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), RESAMPLES) / num_seeds
    prompts = rng.integers(num_prompts, size=(RESAMPLES, num_prompts))
    return np.take_along_axis(drawn @ changes, prompts, axis=1).mean(1)


def change_rows(
    before: Evaluation, after: Sequence[Evaluation], controls: Mapping[str, Evaluation]
) -> Iterator[dict[str, str]]:
    """Of each column, in hundredths: before, the mean over seeds, its change with its interval, controls."""
    for column in before.scores:
        low, high = np.quantile(seed_bootstrap(before, after, column), [0.025, 0.975])
        was = before.mean(column)
        changes = [each.mean(column) - was for each in after]
        change = float(np.mean(changes))
        yield {
            "": column, "before": f"{100 * was:.1f}", "GRPO": f"{100 * (was + change):.1f}",
            "change": _signed(change), "95 %": f"{_signed(low)} to {_signed(high)}",
            "each seed": " ".join(map(_signed, changes)),
            **{name: _signed(control.mean(column) - was) for name, control in controls.items()},
        }  # fmt: skip


def _signed(value: float) -> str:
    return f"{100 * value:+.1f}"


def fallen(before: Evaluation, after: Sequence[Evaluation]) -> list[str]:
    """Columns whose change is significantly below −2 points, Holm-corrected at 5 %."""
    p_values = {name: float((seed_bootstrap(before, after, name) >= MARGIN).mean()) for name in before.scores}
    result: list[str] = []
    for rank, (column, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if p > 0.05 / (len(p_values) - rank):
            break
        result.append(column)
    return result


def draw(runs: Path, results: Mapping[str, Quality], names: Sequence[str], file: Path) -> None:
    """Left: the training reward of every seed. Right: held-out quality before and after."""
    with picture(file, (11, 4.2), layout=None, ncols=2, width_ratios=(1, 1.25)) as (left, right):
        for name in names:
            records = [line for line in read_lines(runs / name / METRICS_FILE) if "reward" in line]
            steps, rewards = (np.array([line[key] for line in records]) for key in ("step", "reward"))
            window = max(1, len(rewards) // 20)
            smooth = np.convolve(rewards, np.ones(window) / window, mode="valid")
            left.plot(steps[window - 1 :], smooth, linewidth=1.2, alpha=0.8, label=name.replace("-", " "))
        left.set(xlabel="step", ylabel="reward, sampled", title="Training reward, moving mean")
        left.legend(frameon=False, fontsize=8)

        columns = [column for column in results["before"].sampled.scores if column != "reward"]
        places = np.arange(len(columns))[::-1]
        for mode, shift, color in (("sampled", 0.15, "tab:blue"), ("greedy", -0.15, "tab:orange")):
            was, *now = (
                np.array([100 * getattr(results[name], mode).mean(column) for column in columns])
                for name in ("before", *names)
            )
            mean = np.mean(now, axis=0)
            right.hlines(places + shift, was, mean, color=color, linewidth=2)
            right.plot(was, places + shift, "o", color="white", markeredgecolor=color, markersize=5)
            right.plot(mean, places + shift, "o", color=color, markersize=5, label=f"{mode}, after")
            for seed in now:
                right.plot(seed, places + shift, "|", color=color, markersize=6, alpha=0.6)
        right.set_yticks(
            places, [c.replace("policy/", "policy: ").replace("environment/", "env.: ") for c in columns]
        )
        right.set(
            xlabel="held-out prompts, percent", title="Before (hollow) and after (filled), ticks: each seed"
        )
        right.legend(frameon=False, fontsize=8, loc="lower left")
        left.figure.tight_layout()
