"""Every knob once: its name, its default, and one line of help; what is wrong with it is in checks.py.

Settings that one piece of code goes by are groups of their own (`groups.py`) and are only gathered
here; on the command line and in YAML all are flat.
"""

from dataclasses import dataclass, field
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Literal

from grpo.config.checks import check
from grpo.config.groups import (
    CheckpointingSetting,
    Credit,
    LoraSettings,
    LossSettings,
    OptimizerSettings,
    Precision,
    PromptSettings,
    SamplingSettings,
    Scale,
)
from grpo.config.limits import NOT_NEGATIVE, POSITIVE, ROWS, SHARE, Limit, at_least

UTILIZATION = Limit(lambda share: 0 < share <= 1, "give a share above 0 and up to 1 (usual: 0.85)")
Tracker = Literal["tensorboard", "wandb"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


@dataclass(frozen=True)
class Config:
    """Train a language model with GRPO: groups of completions, compared with their siblings."""

    # The run
    steps: Annotated[int, at_least(1)] = 100
    """Optimizer steps (rollouts, where num_iterations is above 1)."""
    batch_size: Annotated[int | Literal["auto"], at_least(1)] = 64
    """Completions a step sees: a multiple of the group size. auto: the most that need no splitting,
    found once before the first step; a larger batch is faster, not better."""
    max_batch_size: int = 1024
    """What batch_size auto does not exceed."""
    group_size: Annotated[
        int, at_least(2, "a completion is compared with its siblings, so give at least 2")
    ] = 8
    """Completions of one prompt, compared with each other."""
    seed: int = 0
    """Of the order of prompts and of every sampled token."""
    minutes: Annotated[float | None, POSITIVE] = None
    """Stop after this many minutes of training, if the steps are not done before. Schedules go by whichever
    of both is further."""

    wait_minutes: Annotated[float, POSITIVE] = 30.0
    """Of several processes, started by accelerate launch or torchrun: how long they wait for one another."""

    # The model
    model: str = "auto"
    """Hub id or folder of a causal language model; auto: RookWorld-LM-124M on CUDA, else rook-tiny."""
    device: str = "auto"
    """Where the policy lives: auto, cpu, cuda, cuda:1, mps. With several processes auto, cuda or cpu."""
    reference_device: str | None = None
    """Where the reference model lives; None: beside the policy."""
    reference_sync: Annotated[int, NOT_NEGATIVE] = 0
    """Steps after which the reference becomes the present policy, each time; 0: never."""
    precision: Precision = "auto"
    """Dtype of matrix products; auto: bf16 where native. Weights stay fp32 (with fp64, all is float64)."""

    shard: bool = False
    """Several processes hold one model together, each a part of every weight: for one that fits no card."""
    lora: LoraSettings = field(default_factory=LoraSettings)

    # The data
    prompts: str = "bundled"
    """bundled, a file (.txt .jsonl .csv .tsv .parquet .fen .epd .pgn), or a dataset on the hub:
    OWNER/NAME, OWNER/NAME:SPLIT, OWNER/NAME:CONFIG:SPLIT."""
    asking: PromptSettings = field(default_factory=PromptSettings)
    policy_share: Annotated[float, SHARE] = 0.5
    """Share of policy prompts among the prompts of a step; the others are environment prompts."""
    heldout_share: Annotated[float, SHARE] = 0.05
    """Share of positions kept for evaluation, chosen by a hash of the position."""
    max_bad_share: Annotated[float, SHARE] = 0.01
    """More rows than this that cannot be read, or whose prompt is too long for the model, are an error."""

    # The rewards
    reward: tuple[str, ...] = ("policy", "environment")
    """Reward names, or functions of your own as file.py:name, in TRL's signature."""
    reward_weights: tuple[float, ...] = ()
    """One weight a reward; none given: 1 each."""
    engine: Literal["auto", "off"] = "auto"
    """auto: Stockfish judges policy prompts where it is installed; off: the labels of the prompts do."""
    stockfish_path: str | None = None
    """The Stockfish executable; None: as found on this machine."""
    engine_depth: Annotated[int, at_least(1)] = 8
    """Plies Stockfish searches."""
    num_engines: Annotated[int, at_least(1)] = 1
    """Stockfish processes."""

    # The algorithm
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    advantage_scale: Scale = "group"
    """Divide advantages by the deviation of their group, of the batch, or by none (Dr. GRPO)."""
    credit: Credit = "whole"
    """Which tokens a completion's advantage goes to: all (whole), or of our own rewards each component's to
    the field that it judges (field), which is less noise where few tokens decide."""
    num_iterations: Annotated[int, at_least(1)] = 1
    """Optimizer steps on each rollout."""
    mask_truncated: bool = False
    """Do not learn from completions that were cut at max_new_tokens."""
    refill_groups: Annotated[int, NOT_NEGATIVE] = 0
    """Replace groups of equal rewards by new prompts, up to this many times a step."""
    importance_cap: Annotated[float | None, POSITIVE] = None
    """Correct for the sampler's rounding: weight tokens by p_scorer / p_sampler, at most this."""
    kl_in_reward: bool = False
    """Take the KL (k1, a completion's sum) off its reward instead of adding it to the loss."""
    kl_target: Annotated[float | None, POSITIVE] = None
    """Adapt kl_coef so that the KL settles at this many nats a token."""

    # Memory: changes rows at once and speed, not the result
    memory_utilization: Annotated[float, UTILIZATION] = 0.85
    """Share of the device's memory that may be used."""
    memory_limit: str | None = None
    """The most this process may hold, such as 24GB (2**30 bytes each); enforced on CUDA and on Linux."""
    device_memory: str | None = None
    """With dry_run: plan for a card that is not there, such as 24GB as it is sold with."""
    dry_run: bool = False
    """Print the plan for the longest prompts and completions, and stop."""
    rollout_rows: Annotated[int | None, ROWS] = None
    """Completions sampled at once; None: planned."""
    score_rows: Annotated[int | None, ROWS] = None
    """Completions scored at once without gradients; None: planned."""
    train_rows: Annotated[int | None, ROWS] = None
    """Completions in one backward pass; None: planned."""
    gradient_checkpointing: CheckpointingSetting = "auto"
    """What layers compute again in the backward pass: all (full), or nothing (none); auto: nothing, or all
    where not one completion would fit otherwise."""

    # Evaluation
    eval_interval: Annotated[int, NOT_NEGATIVE] = 50
    """Steps between evaluations on held-out prompts; 0: none at all."""
    eval_prompts: Annotated[int, NOT_NEGATIVE] = 200
    """Held-out prompts an evaluation uses."""

    # The run folder
    runs_dir: Path = Path("runs")
    """Where run folders are made."""
    name: str | None = None
    """Name of the run folder; None: date and time."""
    resume: Path | None = None
    """A run folder to go on with; its settings are the defaults."""
    checkpoint_interval: Annotated[int, NOT_NEGATIVE] = 50
    """Steps between checkpoints; 0: only at the end, and of the best evaluation."""
    keep_checkpoints: Annotated[int, at_least(1)] = 2
    """Checkpoints kept, the newest; the best one is kept besides."""
    trackers: tuple[Tracker, ...] = ("tensorboard",)
    """Where metrics go besides metrics.jsonl."""
    logged_completions: Annotated[int, NOT_NEGATIVE] = 16
    """Completions of each step written to completions.jsonl."""
    show_completions: Annotated[int, NOT_NEGATIVE] = 25
    """Steps after which a completion is shown with its scores, each time; 0: never."""
    log_level: LogLevel = "INFO"
    """Least severity that is shown."""

    def __post_init__(self) -> None:
        for name in ("runs_dir", "resume"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, Path(expanduser(path)))
        check(self)

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
