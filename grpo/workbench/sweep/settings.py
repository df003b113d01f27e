"""What a sweep over batch sizes does, and what is wrong with it if it is wrong.

GRPO's own settings come from a file of train_lean.py; the flags here are those that a sweep is about.
"""

import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from grpo.config import Config, SettingsError, from_flat, to_flat
from grpo.config.groups import LossSettings, OptimizerSettings, Precision, SamplingSettings
from grpo.config.limits import COUNT, SHARE, check_limits
from grpo.config.sizes import SizeError, parse_size
from grpo.workbench.flags import GradientCheckpointing, Objective
from grpo.workbench.spec import ModelSpec

ScaleLR = Literal["none", "linear", "sqrt", "tuned"]

TUNE_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
TUNE_UPDATES = 8
"""Updates of a try of a learning rate, at least: after fewer, any rate looks like any other."""


@dataclass(frozen=True)
class SweepSettings:
    """Train one model at several batch sizes, each on equally many tokens (lm) or samples (grpo)."""

    objective: Objective = "lm"
    """lm: plain language modelling on a text. grpo: what train_lean.py does."""
    batch_sizes: tuple[int, ...] = (8, 16, 32, 64, 128, 256)
    """Windows (lm) or completions (grpo) an update learns from."""
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

    # The model and the data
    model: ModelSpec = field(default_factory=ModelSpec)
    """What is trained: with lm, a model made by --arch from random weights, any other from its own."""
    device: str = "auto"
    """Where to train: auto, cpu, cuda, cuda:1, mps."""
    precision: Precision = "auto"
    """Dtype of matrix products; auto: bf16 where native."""
    data: str | None = None
    """Text to learn from (lm), its last tenth held out; bundled: chess positions and moves, 0.8 MB."""
    heldout: Annotated[int, COUNT] = 128
    """Held-out windows (lm) or prompts (grpo) of an evaluation, at most."""
    evaluations: Annotated[int, COUNT] = 10
    """Evaluations of each size, at equal tokens or samples, besides the one before the first update."""

    # The learning rate
    scale_lr: ScaleLR = "none"
    """learning_rate at base_batch_size: keep it, scale it with the size (Goyal et al. 2017), with its square
    root (Krizhevsky 2014; Malladi et al. 2022, for Adam), or try 1/4 to 4 times the latter at each size."""
    base_batch_size: Annotated[int, COUNT] = 64
    """The batch size that learning_rate is meant for."""
    tune_share: Annotated[float, SHARE] = 0.1
    """With scale_lr tuned: share of the tokens or samples that each try gets."""
    warmup_share: Annotated[float, SHARE] = 0.05
    """Share of each size's updates in which the learning rate rises from zero."""
    optimizer: OptimizerSettings = field(
        default_factory=lambda: OptimizerSettings(
            learning_rate=1e-3, lr_schedule="cosine", weight_decay=0.1, adam_beta2=0.95
        )
    )
    """How weights move at base_batch_size. warmup_steps stays 0: see warmup_share."""

    # How it runs
    train_rows: Annotated[int | None, COUNT] = None
    """Rows in one backward pass; None: the whole batch, or it is out of memory."""
    gradient_checkpointing: GradientCheckpointing = "auto"
    compile: bool = False
    """torch.compile the model (lm)."""
    tf32: bool = False
    """On CUDA, multiply fp32 matrices in TF32."""
    memory_limit: str | None = None
    """The most that a size may hold, such as 24GB (2**30 bytes each); enforced on CUDA and on Linux."""
    seed: int = 0
    """Of random weights, of the order of windows or prompts, and of sampled tokens."""

    # GRPO
    group_size: int = Config.group_size
    """Completions of one prompt (grpo)."""
    max_new_tokens: int = SamplingSettings.max_new_tokens
    """Longest completion in tokens (grpo)."""
    kl_coef: float = LossSettings.kl_coef
    """Weight of the KL to the reference model (grpo)."""
    train: Annotated[Config, tyro.conf.Fixed, tyro.conf.Suppress] = field(default_factory=Config)

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def unit(self) -> str:
        return "tokens" if self.objective == "lm" else "samples"

    @property
    def total(self) -> int:
        """Units that each size learns from."""
        return self.total_tokens if self.objective == "lm" else self.total_samples

    @property
    def higher_is_better(self) -> bool:
        """Of held-out figures: a reward, not a loss."""
        return self.objective == "grpo"

    @property
    def row_units(self) -> int:
        """Units in a row of a batch."""
        return self.model.context if self.objective == "lm" else 1

    @property
    def memory_limit_bytes(self) -> int | None:
        return parse_size(self.memory_limit) if self.memory_limit else None

    def num_updates(self, batch_size: int, total: int | None = None) -> int:
        return (total or self.total) // (batch_size * self.row_units)

    def rate(self, batch_size: int) -> float:
        """The peak learning rate of a size; with scale_lr tuned, the middle of the grid."""
        ratio = batch_size / self.base_batch_size
        factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio), "tuned": math.sqrt(ratio)}
        return self.optimizer.learning_rate * factor[self.scale_lr]

    def tune_total(self, batch_size: int) -> int:
        """Units of a try of a learning rate."""
        least = TUNE_UPDATES * batch_size * self.row_units
        return min(self.total, max(int(self.tune_share * self.total), least))

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        flat = {item.name: getattr(self, item.name) for item in fields(self)}
        return flat | {
            "batch_sizes": list(self.batch_sizes), "output": str(self.output) if self.output else None,
            "model": asdict(self.model), "optimizer": asdict(self.optimizer),
            "train": to_flat(self.train) if self.objective == "grpo" else {},
        }  # fmt: skip


def from_json(values: dict[str, Any]) -> SweepSettings:
    """What `as_json` made."""
    return SweepSettings(**{
        **values, "batch_sizes": tuple(values["batch_sizes"]),
        "output": Path(values["output"]) if values["output"] else None,
        "model": ModelSpec(**values["model"]), "optimizer": OptimizerSettings(**values["optimizer"]),
        "train": from_flat(values["train"]),
    })  # fmt: skip


def _validate(settings: SweepSettings) -> None:
    def need(holds: bool, message: str) -> None:
        if not holds:
            raise SettingsError(message)

    need(len(settings.batch_sizes) > 0, "batch_sizes is empty: give at least one.")
    check_limits(settings)
    try:
        parse_size(settings.memory_limit or "1GB")
    except SizeError as error:
        raise SettingsError(f"memory_limit is {error}") from None
    need(
        settings.optimizer.warmup_steps == 0,
        f"warmup_steps is {settings.optimizer.warmup_steps}: sizes differ in steps; give --warmup-share.",
    )
    need(
        not settings.compile or settings.objective == "lm",
        "compile is on, which is for --objective lm: leave it out for grpo.",
    )
    need(
        settings.objective == "lm" or settings.model.arch is None,
        f"arch is {settings.model.arch!r}, but grpo improves a model that can write already: give --model.",
    )
    name, row = f"total_{settings.unit}", settings.row_units
    for size in settings.batch_sizes:
        need(size >= 1, f"batch_sizes holds {size}: a batch has at least 1 row.")
        need(
            settings.num_updates(size) >= 1,
            f"{name} is {settings.total}, less than one batch of {size}, which has {size * row} "
            f"{settings.unit}: give at least {size * row}, or leave that size out.",
        )
        if settings.objective == "grpo":
            run_config(settings, size)


def run_config(
    settings: SweepSettings,
    batch_size: int,
    *,
    total: int | None = None,
    rate: float | None = None,
    evaluations: int | None = None,
    folder: Path = Path(),
) -> Config:
    """The settings of train_lean.py for one size, in `folder`. SettingsError where they cannot be."""
    steps = settings.num_updates(batch_size, total)
    optimizer = replace(
        settings.optimizer,
        learning_rate=settings.rate(batch_size) if rate is None else rate,
        warmup_steps=round(settings.warmup_share * steps),
    )
    return replace(
        settings.train,
        steps=steps, batch_size=batch_size, group_size=settings.group_size, seed=settings.seed, minutes=None,
        model=settings.model.name, device=settings.device, precision=settings.precision,
        sampling=replace(settings.train.sampling, max_new_tokens=settings.max_new_tokens),
        loss=replace(settings.train.loss, kl_coef=settings.kl_coef), optimizer=optimizer,
        memory_utilization=1.0, memory_limit=settings.memory_limit, device_memory=None, dry_run=False,
        rollout_rows=None, score_rows=None, train_rows=settings.train_rows,
        gradient_checkpointing=settings.gradient_checkpointing,
        eval_interval=max(1, round(steps / (evaluations or settings.evaluations))),
        eval_prompts=settings.heldout, checkpoint_interval=0, trackers=(), resume=None,
        runs_dir=folder.parent, name=folder.name or None,
    )  # fmt: skip
