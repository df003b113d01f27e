"""Every setting once: its name, its limits, its default, and its text for the help."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from grpo.config.groups import (
    CheckpointingSetting,
    LoraSettings,
    LossSettings,
    OptimizerSettings,
    Precision,
    PromptSettings,
    SamplingSettings,
    Scale,
)
from grpo.config.limits import (
    FINITE,
    NOT_NEGATIVE,
    PART,
    POSITIVE,
    ROWS,
    SHARE,
    SIZE,
    Limit,
    Settings,
    at_least,
)
from grpo.errors import UserError

REWARDS = Limit(len, "give at least one, such as policy")
DISTINCT = Limit(
    lambda specs: len({spec.rpartition(":")[2] for spec in specs}) == len(specs),
    "two have one name, rename one",
)
NOT_ALL_ZERO = Limit(
    lambda weights: any(weights) or not weights, "nothing would count, give one that is not 0"
)
FOLDER_NAME = Limit(
    lambda name: name not in ("", ".", "..") and not set(name) & set("/\\\0"),
    "that is no name of one folder, give one without / and \\, and --runs-dir for where it is made",
)
HUB_NAME = Limit(lambda name: re.fullmatch(r"[\w.-]+/[\w.-]+", name), "give it as owner/name")
PRINTABLE = Limit(str.isprintable, "that cannot be printed, give one without control characters")


@dataclass(frozen=True)
class RunSettings(Settings):
    """The run."""

    steps: Annotated[int, at_least(1)] = 100
    """Optimizer steps (rollouts, where num_iterations is above 1)."""
    batch_size: Annotated[int | Literal["auto"], at_least(1)] = 64
    """Completions a step sees: a multiple of the group size. auto: the most that need no splitting,
    found once before the first step; a larger batch is faster, not better."""
    max_batch_size: int = 1024
    """The most that batch_size auto chooses."""
    group_size: Annotated[int, at_least(2, "a completion is compared with siblings, give at least 2")] = 8
    """Completions of one prompt, compared with each other."""
    seed: int = 0
    """Fixes the order of prompts and every sampled token."""
    minutes: Annotated[float | None, POSITIVE] = None
    """Stop after this many minutes of training, if the steps are not done before. Schedules go by whichever
    of both is further."""

    wait_minutes: Annotated[float, POSITIVE] = 30.0
    """How long several processes, started by accelerate launch or torchrun, wait for one another."""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.batch_size != "auto" and self.batch_size % self.group_size:
            yield _not_whole("batch_size", self.batch_size, self.group_size)
        if self.max_batch_size < self.group_size:
            yield f"max_batch_size is {self.max_batch_size}: give at least one group, {self.group_size}."

    @property
    def num_prompts(self) -> int:
        """The prompts of a step."""
        return self.num_rows // self.group_size

    @property
    def num_rows(self) -> int:
        """The completions of a step, N; ValueError while batch_size is still auto."""
        if self.batch_size == "auto":
            raise UserError("batch_size is auto: it has not been found yet.")
        return self.batch_size


@dataclass(frozen=True)
class ModelSettings(Settings):
    """The model."""

    model: str = "auto"
    """Hub id or folder of a causal language model; auto: RookWorld-LM-124M on CUDA, else rook-tiny."""
    device: str = "auto"
    """The policy's device: auto, cpu, cuda, cuda:1, mps. With several processes auto, cuda or cpu."""
    reference_device: str | None = None
    """The reference model's device; None: the policy's."""
    reference_sync: Annotated[int, NOT_NEGATIVE] = 0
    """Steps after which the reference becomes the present policy, each time; 0: never."""
    precision: Precision = "auto"
    """Dtype of matrix products; auto: bf16 where native, fp16 (with a loss scale) on CUDA cards without it.
    Weights stay fp32 (with fp64, all is float64)."""
    fp32_logits: bool = False
    """Keep logits in fp32 where other products are in 16 bits: the log-probs of sampler and scorer come
    closer to each other, and the vocabulary's head takes longer."""

    shard: bool = False
    """Several processes hold one model together, each a part of every weight: for one that fits no card."""


@dataclass(frozen=True)
class DataSettings(Settings):
    """The data."""

    prompts: str = "bundled"
    """bundled, a file (.txt .jsonl .csv .tsv .parquet .fen .epd .pgn), or a dataset on the hub:
    OWNER/NAME, OWNER/NAME:SPLIT, OWNER/NAME:CONFIG:SPLIT."""
    policy_share: Annotated[float, SHARE] = 0.5
    """Share of policy prompts among the prompts of a step; the others are environment prompts."""
    heldout_share: Annotated[float, SHARE] = 0.05
    """Share of positions kept for evaluation, chosen by a hash of the position."""
    max_bad_share: Annotated[float, SHARE] = 0.01
    """More rows than this that cannot be read, or whose prompt is too long for the model, are an error."""


@dataclass(frozen=True)
class RewardSettings(Settings):
    """The rewards."""

    reward: Annotated[tuple[str, ...], REWARDS, DISTINCT] = ("policy", "environment")
    """Reward names, or functions of your own as file.py:name, in TRL's signature."""
    reward_weights: Annotated[tuple[float, ...], FINITE, NOT_ALL_ZERO] = ()
    """One weight a reward; none given: 1 each."""
    engine: Literal["auto", "off"] = "auto"
    """auto: Stockfish judges policy prompts where it is installed; off: the labels of the prompts do."""
    stockfish_path: str | None = None
    """The Stockfish executable; None: as found on this machine."""
    engine_depth: Annotated[int, at_least(1)] = 8
    """Plies Stockfish searches."""
    num_engines: Annotated[int, at_least(1)] = 1
    """Stockfish processes."""


@dataclass(frozen=True)
class AlgorithmSettings(Settings):
    """The algorithm."""

    advantage_scale: Scale = "group"
    """Divide advantages by the deviation of their group, of the batch, or by none (Dr. GRPO)."""
    credit: Literal["whole", "field"] = "whole"
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

    @property
    def scores_policy(self) -> bool:
        """Whether the policy's log-probs are computed before it learns; else it still is what they are of."""
        return self.num_iterations > 1 or self.kl_in_reward


@dataclass(frozen=True)
class MemorySettings(Settings):
    """Memory: rows at once and speed, not the result."""

    memory_utilization: Annotated[float, PART] = 0.85
    """Share of the device's memory that may be used."""
    memory_limit: Annotated[str | None, SIZE] = None
    """The most this process may hold, such as 24GB (2**30 bytes each); enforced on CUDA and on Linux."""
    device_memory: Annotated[str | None, SIZE] = None
    """With dry_run: plan for a card that is not there, such as 24GB as it is sold with."""
    dry_run: bool = False
    """Print the plan for the longest prompts and completions, and stop."""
    rollout_rows: Annotated[int | None, ROWS] = None
    """Completions sampled at once; None: planned."""
    typical_tokens: Annotated[int | None, at_least(1)] = None
    """Tokens of a completion on average, by which sampling is planned until steps tell; None: all may be as
    long as max_new_tokens."""
    score_rows: Annotated[int | None, ROWS] = None
    """Completions of the longest scored at once without gradients, more of shorter ones; None: planned."""
    train_rows: Annotated[int | None, ROWS] = None
    """Completions of the longest in one backward pass, more of shorter ones; None: planned."""
    gradient_checkpointing: CheckpointingSetting = "auto"
    """Whether layers compute all again in the backward pass (full), or nothing (none); auto: full where few
    completions would learn at once otherwise."""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.device_memory is not None and not self.dry_run:
            yield f"device_memory is {self.device_memory}, of a card that is not there: add --dry-run."


@dataclass(frozen=True)
class EvaluationSettings(Settings):
    """Evaluation."""

    eval_interval: Annotated[int, NOT_NEGATIVE] = 50
    """Steps between evaluations on held-out prompts; 0: none at all."""
    eval_prompts: Annotated[int, NOT_NEGATIVE] = 200
    """Held-out prompts an evaluation uses."""


@dataclass(frozen=True)
class FolderSettings(Settings):
    """The run folder."""

    runs_dir: Path = Path("runs")
    """The folder in which run folders are made."""
    name: Annotated[str | None, FOLDER_NAME, PRINTABLE] = None
    """Name of the run folder; None: date and time."""
    resume: Path | None = None
    """A run folder to go on with; its settings are the defaults."""
    checkpoint_interval: Annotated[int, NOT_NEGATIVE] = 50
    """Steps between checkpoints; 0: only at the end, and of the best evaluation."""
    keep_checkpoints: Annotated[int, at_least(1)] = 2
    """Checkpoints kept, the newest; the best one is kept besides."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    """Trackers that metrics go to besides metrics.jsonl; wandb and trackio get completions, too."""
    logged_completions: Annotated[int, NOT_NEGATIVE] = 16
    """Completions of each step written to completions.jsonl."""
    show_completions: Annotated[int, NOT_NEGATIVE] = 25
    """Steps after which a completion is shown with its scores, each time; 0: never."""
    push_to_hub: Annotated[str | None, HUB_NAME] = None
    """Upload the model as owner/name when the run is done, with a card that says how it was made."""
    hub_private: bool = True
    """Whether nobody else may see it there, if that makes the repository."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Least severity that is shown."""


@dataclass(frozen=True)
class Config(
    FolderSettings,
    EvaluationSettings,
    MemorySettings,
    OptimizerSettings,
    LossSettings,
    AlgorithmSettings,
    SamplingSettings,
    RewardSettings,
    PromptSettings,
    DataSettings,
    LoraSettings,
    ModelSettings,
    RunSettings,
):
    """Train a language model with GRPO: groups of completions, compared with their siblings."""

    # A dataclass has the fields of its last base first: so they come in the order of the help.

    max_new_tokens: Annotated[int, at_least(0, "give at least 1, or leave it out")] = 0
    """Longest completion in tokens, the end-of-text token included; 0 until `resolve_max_new_tokens`
    knows what is trained: 144 for RookWorld's texts, 512 for prompts and rewards of your own."""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        for name in ("rollout_rows", "score_rows", "train_rows"):
            rows = getattr(self, name)
            if rows and rows % self.group_size and self.group_size % rows:
                yield _not_whole(name, rows, self.group_size, parts=True)
        if self.max_new_tokens and (self.typical_tokens or 0) > self.max_new_tokens:
            yield (
                f"typical_tokens is {self.typical_tokens}, more than max_new_tokens, {self.max_new_tokens}: "
                "give what texts have on average, or leave it out."
            )
        if self.temperature == 0:
            yield "temperature is 0: a group of equal completions teaches nothing, give more (usual: 1.0)."
        if self.credit == "field" and not self.is_per_token:
            yield "credit is field, but importance_level is sequence: give token, or credit whole."
        for name in ("kl_in_reward", "kl_target", "reference_sync"):
            if (value := getattr(self, name)) and not self.uses_reference:
                yield f"{name} is {value}, but kl_coef is 0: give kl_coef more than 0 (usual: 0.02)."
        if (device := self.reference_device) is not None and self.uses_lora:
            yield f"reference_device is {device}, but the reference of lora_rank is the policy: leave it out."
        if self.load_in_4bit and self.precision == "fp64":
            yield "precision is fp64, but load_in_4bit has products in fp32 at most: give bf16 or fp32."


def _not_whole(name: str, rows: int, group_size: int, *, parts: bool = False) -> str:
    """parts: whether a group may be divided, too."""
    fitting = [size for size in range(1, group_size if parts else 1) if group_size % size == 0]
    fitting += [rows // group_size * group_size, -(-rows // group_size) * group_size]
    below, above = [size for size in fitting if 0 < size < rows], [size for size in fitting if size > rows]
    nearest = " or ".join(map(str, [*sorted(below)[-1:], min(above)]))
    return f"{name} is {rows}, and groups of {group_size} stay whole: give {nearest}, or another group_size."
