"""Every knob once: its name, its default, one line of help, and what is wrong with it if it is wrong.

Settings that belong to one piece of code live beside it (`SamplingSettings`, `LossSettings`,
`OptimizerSettings`) and are only gathered here; on the command line and in YAML all are flat.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from grpo.adapters import LoraSettings
from grpo.advantages import Scale
from grpo.loss import LossSettings
from grpo.memory.budget import SizeError, parse_size
from grpo.optimizer import OptimizerSettings
from grpo.sampling import SamplingSettings
from grpo.values import Precision

Tracker = Literal["tensorboard", "wandb"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


@dataclass(frozen=True)
class Config:
    """Train a language model with GRPO: groups of completions, compared with their siblings."""

    # The run
    steps: int = 100
    """Optimizer steps (rollouts, where num_iterations is above 1)."""
    batch_size: int | Literal["auto"] = 64
    """Completions a step sees: a multiple of the group size. auto: the most that need no splitting,
    found once before the first step; a larger batch is faster, not better."""
    max_batch_size: int = 1024
    """What batch_size auto does not exceed."""
    group_size: int = 8
    """Completions of one prompt, compared with each other."""
    seed: int = 0
    """Of the order of prompts and of every sampled token."""
    minutes: float | None = None
    """Stop after this many minutes of training, if the steps are not done before."""

    wait_minutes: float = 30.0
    """Of several processes, started by accelerate launch or torchrun: how long they wait for one another."""

    # The model
    model: str = "auto"
    """Hub id or folder of a causal language model; auto: RookWorld-LM-124M on CUDA, else rook-tiny."""
    device: str = "auto"
    """Where the policy lives: auto, cpu, cuda, cuda:1, mps. With several processes auto, cuda or cpu."""
    reference_device: str | None = None
    """Where the reference model lives; None: beside the policy."""
    reference_sync: int = 0
    """Steps after which the reference becomes the present policy, each time; 0: never."""
    precision: Precision = "auto"
    """Dtype of matrix products; auto: bf16 where native. Weights stay fp32 (with fp64, all is float64)."""

    shard: bool = False
    """Several processes hold one model together, each a part of every weight: for one that fits no card."""
    lora: LoraSettings = field(default_factory=LoraSettings)

    # The data
    prompts: str = "bundled"
    """bundled, a file (.txt .jsonl .parquet .fen .epd .pgn), or a hub dataset with a text column."""
    policy_share: float = 0.5
    """Share of policy prompts among the prompts of a step; the others are environment prompts."""
    heldout_share: float = 0.05
    """Share of positions kept for evaluation, chosen by a hash of the position."""
    max_bad_share: float = 0.01
    """More rows than this that cannot be read, or whose prompt is too long for the model, are an error."""
    trailing_space: bool = False
    """End policy prompts with a space, as some of RookWorld's own scripts do."""

    # The rewards
    reward: tuple[str, ...] = ("policy", "environment")
    """Reward names, or functions of your own as file.py:name, in TRL's signature."""
    reward_weights: tuple[float, ...] = ()
    """One weight a reward; none given: 1 each."""
    engine: Literal["auto", "off"] = "auto"
    """auto: Stockfish judges policy prompts where it is installed; off: the labels of the prompts do."""
    stockfish_path: str | None = None
    """The Stockfish executable; None: as found on this machine."""
    engine_depth: int = 8
    """Plies Stockfish searches."""
    num_engines: int = 1
    """Stockfish processes."""

    # The algorithm
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    advantage_scale: Scale = "group"
    """Divide advantages by the deviation of their group, of the batch, or by none (Dr. GRPO)."""
    num_iterations: int = 1
    """Optimizer steps on each rollout."""
    mask_truncated: bool = False
    """Do not learn from completions that were cut at max_new_tokens."""
    refill_groups: int = 0
    """Replace groups of equal rewards by new prompts, up to this many times a step."""
    importance_cap: float | None = None
    """Correct for the sampler's rounding: weight tokens by p_scorer / p_sampler, at most this."""
    kl_in_reward: bool = False
    """Take the KL (k1, a completion's sum) off its reward instead of adding it to the loss."""
    kl_target: float | None = None
    """Adapt kl_coef so that the KL settles at this many nats a token."""

    # Memory: changes rows at once and speed, not the result
    memory_utilization: float = 0.85
    """Share of the device's memory that may be used."""
    memory_limit: str | None = None
    """The most this process may hold, such as 24GB (2**30 bytes each); enforced on CUDA and on Linux."""
    device_memory: str | None = None
    """With dry_run: plan for a card that is not there, such as 24GB as it is sold with."""
    dry_run: bool = False
    """Print the plan for the longest prompts and completions, and stop."""
    rollout_rows: int | None = None
    """Completions sampled at once; None: planned."""
    score_rows: int | None = None
    """Completions scored at once without gradients; None: planned."""
    train_rows: int | None = None
    """Completions in one backward pass; None: planned."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""

    # Evaluation
    eval_interval: int = 50
    """Steps between evaluations on held-out prompts; 0: none at all."""
    eval_prompts: int = 200
    """Held-out prompts an evaluation uses."""

    # The run folder
    runs_dir: Path = Path("runs")
    """Where run folders are made."""
    name: str | None = None
    """Name of the run folder; None: date and time."""
    resume: Path | None = None
    """A run folder to go on with; its settings are the defaults."""
    checkpoint_interval: int = 50
    """Steps between checkpoints; 0: only at the end, and of the best evaluation."""
    keep_checkpoints: int = 2
    """Checkpoints kept, the newest; the best one is kept besides."""
    trackers: tuple[Tracker, ...] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl."""
    logged_completions: int = 16
    """Completions of each step written to completions.jsonl."""
    log_level: LogLevel = "INFO"
    """Least severity that is shown."""

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def num_prompts(self) -> int:
        """Prompts a step."""
        return self.num_rows // self.group_size

    @property
    def num_rows(self) -> int:
        """Completions a step, N; ValueError while batch_size is still auto."""
        if self.batch_size == "auto":
            raise ValueError("batch_size is auto: it has not been found yet.")
        return self.batch_size

    @property
    def uses_reference(self) -> bool:
        return self.loss.kl_coef > 0


class SettingsError(ValueError):
    """A setting that cannot be: names it, its value, and what to do."""


def _validate(config: Config) -> None:
    """SettingsError for the first setting that cannot be."""
    for check in (
        _check_ranges, _check_batch, _check_memory, _check_rewards, _check_positive, _check_reference
    ):  # fmt: skip
        check(config)


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise SettingsError(message)


def _check_ranges(config: Config) -> None:
    for name in ("steps", "num_iterations", "num_engines", "engine_depth", "keep_checkpoints", "batch_size"):
        value = getattr(config, name)
        _need(value == "auto" or value >= 1, f"{name} is {value}: give at least 1.")
    for name in (
        "eval_interval", "eval_prompts", "checkpoint_interval", "logged_completions", "refill_groups",
        "reference_sync",
    ):  # fmt: skip
        value = getattr(config, name)
        _need(value >= 0, f"{name} is {value}: give 0 or more.")
    for name in ("rollout_rows", "score_rows", "train_rows"):
        value = getattr(config, name)
        _need(
            value is None or value >= 1, f"{name} is {value}: give at least 1, or leave it out for all rows."
        )
    for name in ("policy_share", "heldout_share", "max_bad_share"):
        value = getattr(config, name)
        _need(0 <= value <= 1, f"{name} is {value}: give a share between 0 and 1.")


def _check_batch(config: Config) -> None:
    _need(
        config.group_size >= 2,
        f"group_size is {config.group_size}: a completion is compared with its siblings, so give at least 2.",
    )
    if config.batch_size != "auto":
        _need(
            config.batch_size % config.group_size == 0, _not_a_multiple(config.batch_size, config.group_size)
        )
    _need(
        config.max_batch_size >= config.group_size,
        f"max_batch_size is {config.max_batch_size}, less than one group of {config.group_size}: give more.",
    )


def _check_memory(config: Config) -> None:
    _need(
        0 < config.memory_utilization <= 1,
        f"memory_utilization is {config.memory_utilization}: give a share above 0 and up to 1 (usual: 0.85).",
    )
    for name in ("memory_limit", "device_memory"):
        value = getattr(config, name)
        try:
            if value is not None:
                parse_size(value)
        except SizeError:
            raise SettingsError(
                f"{name} is {value!r}, which is no size: write it like 24GB or 512MB."
            ) from None
    _need(
        config.device_memory is None or config.dry_run,
        f"device_memory is {config.device_memory}, which is for a card that is not there: add --dry-run.",
    )


def _check_rewards(config: Config) -> None:
    """What tells the completions of a group apart."""
    _need(
        config.sampling.temperature > 0,
        "temperature is 0: a group of equal completions teaches nothing; give more than 0 (usual: 1.0).",
    )
    _need(len(config.reward) > 0, "reward is empty: give at least one, such as policy.")
    names = [spec.rpartition(":")[2] for spec in config.reward]
    _need(len(set(names)) == len(names), f"reward names {', '.join(names)} are not distinct: rename one.")
    _need(
        len(config.reward_weights) in (0, len(config.reward)),
        f"reward_weights has {len(config.reward_weights)} numbers for {len(config.reward)} rewards: "
        "give one each.",
    )
    _need(
        all(map(math.isfinite, config.reward_weights)),
        f"reward_weights is {list(config.reward_weights)}: give finite numbers.",
    )


def _check_positive(config: Config) -> None:
    for name in ("minutes", "wait_minutes", "importance_cap", "kl_target"):
        value = getattr(config, name)
        _need(value is None or value > 0, f"{name} is {value}: give more than 0, or leave it out.")


def _check_reference(config: Config) -> None:
    _need(
        not config.kl_in_reward or config.loss.kl_coef > 0,
        "kl_in_reward is on, but kl_coef is 0: give kl_coef more than 0 (usual: 0.02).",
    )
    _need(
        config.kl_target is None or config.loss.kl_coef > 0,
        "kl_target needs a coefficient to start from: give kl_coef more than 0 (usual: 0.02).",
    )
    _need(
        not config.reference_sync or config.uses_reference,
        f"reference_sync is {config.reference_sync}, but kl_coef is 0, so there is no reference: "
        "give kl_coef more than 0 (usual: 0.02), or leave it out.",
    )
    _need(
        config.reference_device is None or not config.lora.on,
        f"reference_device is {config.reference_device}, but with lora_rank the reference is the policy "
        "itself without its adapters: leave it out.",
    )


def _not_a_multiple(batch_size: int, group_size: int) -> str:
    below, above = batch_size // group_size * group_size, -(-batch_size // group_size) * group_size
    if not below:
        return (
            f"batch_size is {batch_size}, less than one group of {group_size}: "
            f"give {above} or a multiple of it, or a smaller group_size."
        )
    return (
        f"batch_size is {batch_size}, which is not a multiple of group_size {group_size}: "
        f"groups stay whole. {below} and {above} are the nearest multiples."
    )
