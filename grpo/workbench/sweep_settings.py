"""The settings of a sweep, and what follows for each of its sizes: updates, learning rate, task."""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from grpo.config.limits import COUNT, SHARE, Settings
from grpo.workbench.settings import Task

TUNE_UPDATES = 8
"""Least updates of a run that tries a learning rate: after fewer, all rates look alike."""
LOW_RESOURCE = {
    "batch_sizes": 64,
    "total_tokens": 100_000,
    "total_samples": 256,
    "eval_prompts": 32,
    "evaluations": 4,
    "max_new_tokens": 48,
    "layers": 2,
    "width": 128,
    "context": 64,
}
"""The most that --low-resource allows; layers and width count for a model made by --arch."""
LM_DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "lr_schedule": "cosine",
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "warmup_steps": 5,
    "eval_prompts": 128,
}
"""Defaults of language modelling; the warm-up is 5 of 100 steps."""


@dataclass(frozen=True)
class SweepFlags(Settings):
    """Sizes, their work, and their learning rates."""

    batch_sizes: tuple[int, ...] = ()
    """Windows (lm) or completions (grpo) an update learns from; none: 8 to 256, or 2 to 64 groups."""
    total_tokens: int = 400_000
    """Tokens that each size learns from (lm), less what does not fill a last batch."""
    total_samples: int = 4096
    """Completions that each size learns from (grpo), less what does not fill a last batch."""
    output: Path | None = None
    """The sweep's folder, new or to be gone on with; None: runs/sweep- and date and time."""
    again: bool = False
    """Do finished sizes again as well."""
    low_resource: bool = False
    """Shrink the sweep for a laptop: fewer and shorter batches, and a smaller model made by --arch."""
    evaluations: Annotated[int, COUNT] = 10
    """Evaluations of each size, at equal tokens or samples, on --eval-prompts held-out windows or prompts."""
    scale_lr: Literal["none", "linear", "sqrt", "tuned"] = "none"
    """learning_rate at base_batch_size: keep it, scale it with the size (Goyal et al. 2017), with its square
    root (Krizhevsky 2014; Malladi et al. 2022, for Adam), or try 1/4 to 4 times the latter at each size."""
    base_batch_size: Annotated[int | None, COUNT] = None
    """The batch size that learning_rate is meant for; None: that of --config, or 64."""
    tune_share: Annotated[float, SHARE] = 0.1
    """With scale_lr tuned: share of the tokens or samples that each try gets."""
    warmup_share: Annotated[float | None, SHARE] = None
    """Share of each size's updates in which the learning rate rises from zero; None: warmup_steps / steps."""


@dataclass(frozen=True)
class Sweep(Task, SweepFlags):
    """Train one model at several batch sizes, each on equally many tokens (lm) or samples (grpo).

    Other flags are those of train_lean.py, which `--config FILE` holds, too.
    """

    MANAGED_FLAGS = (*Task.MANAGED_FLAGS, "runs_dir", "eval_interval", "trackers", "prompt_tokens")

    objective: Literal["grpo", "lm"] = "lm"
    """lm: plain language modelling on a text. grpo: what train_lean.py does."""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        for size in self.sizes:
            if size < 1:
                yield f"batch_sizes holds {size}: a batch has at least 1 row."
            if self.num_updates(size) < 1:
                least = size * self.row_units
                yield (
                    f"total_{self.unit} is {self.total}, less than one batch of {size}, which has {least} "
                    f"{self.unit}: give at least {least}, or leave that size out."
                )
            self.size_task(size, self.rate(size))  # which checks itself

    @classmethod
    def parse(cls, arguments: Sequence[str] | None = None, **defaults: Any) -> Self:
        words = list(sys.argv[1:] if arguments is None else arguments)
        is_grpo = "--objective=grpo" in words or ("--objective", "grpo") in pairwise(words)
        return super().parse(words, **({"objective": "grpo"} if is_grpo else LM_DEFAULTS), **defaults)

    @property
    def sizes(self) -> list[int]:
        """All batch sizes, in order."""
        unit = self.group_size if self.objective == "grpo" else 4
        return sorted(set(self.batch_sizes or (unit * 2**power for power in range(1, 7))))

    @property
    def unit(self) -> str:
        return "tokens" if self.objective == "lm" else "samples"

    @property
    def total(self) -> int:
        """Units that each size learns from."""
        return self.total_tokens if self.objective == "lm" else self.total_samples

    @property
    def row_units(self) -> int:
        """Units in a row of a batch."""
        return self.context if self.objective == "lm" else 1

    @property
    def warm_up(self) -> float:
        """Share of the updates in which the learning rate rises."""
        return min(1.0, self.warmup_steps / self.steps if self.warmup_share is None else self.warmup_share)

    @property
    def base(self) -> int:
        """The batch size that the learning rate is meant for."""
        return self.base_batch_size or (64 if self.batch_size == "auto" else self.batch_size)

    def num_updates(self, batch_size: int, total: int | None = None) -> int:
        return (total or self.total) // (batch_size * self.row_units)

    def rate(self, batch_size: int) -> float:
        """The peak learning rate of a size; with scale_lr tuned, the middle of the grid."""
        ratio = batch_size / self.base
        factor = {"none": 1.0, "linear": ratio}.get(self.scale_lr, math.sqrt(ratio))
        return self.learning_rate * factor

    def tune_total(self, batch_size: int) -> int:
        """Units that each try of a learning rate learns from."""
        least = TUNE_UPDATES * batch_size * self.row_units
        return min(self.total, max(int(self.tune_share * self.total), least))

    def size_task(
        self, batch_size: int, rate: float, *, total: int | None = None, evaluations: int = 0
    ) -> Task:
        """The settings of one size's process. SettingsError where they cannot be."""
        steps = self.num_updates(batch_size, total)
        return self.task(
            batch_size=batch_size,
            steps=steps,
            learning_rate=rate,
            warmup_steps=round(self.warm_up * steps),
            eval_interval=max(1, round(steps / (evaluations or self.evaluations))),
        )


def apply_low_resource(settings: Sweep) -> tuple[Sweep, list[str]]:
    """The sweep within LOW_RESOURCE, as far as a setting matters to it, and the changes in words."""
    sizes = tuple(size for size in settings.sizes if size <= LOW_RESOURCE["batch_sizes"])
    sizes = sizes or (settings.sizes[0],)
    changes = [f"batch_sizes up to {sizes[-1]}"] if len(sizes) < len(settings.sizes) else []
    matters = [f"total_{settings.unit}", "evaluations", "eval_prompts"]
    matters += ["context"] if settings.objective == "lm" else ["max_new_tokens"]
    matters += ["layers", "width"] if settings.arch is not None else []
    caps: dict[str, Any] = {name: LOW_RESOURCE[name] for name in matters}
    chosen = {name: getattr(settings, name) for name in caps}
    if chosen.get("max_new_tokens") == 0:  # which the reward says, and is more
        chosen["max_new_tokens"] = math.inf
    less = {name: cap for name, cap in caps.items() if chosen[name] > cap}
    changes += [f"{name} {getattr(settings, name) or 'as it is'} to {cap}" for name, cap in less.items()]
    return replace(settings, batch_sizes=sizes, **less), changes
