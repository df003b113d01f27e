"""Settings of the workbench's commands: the flags of train_lean.py, and some of their own.

Settings alone, read and checked before torch is loaded. `--config FILE` may hold any of them.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, make_dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_type_hints

import tyro

from grpo.config import Config
from grpo.config.groups import BUNDLED, Precision
from grpo.config.limits import COUNT, SIZE, Limit, Settings, SettingsError, at_least
from grpo.config.reading import take_config

OR_NONE = at_least(1, "give at least 1, or leave it out")


def new_folder(kind: str) -> Path:
    """The folder of the results where none is given."""
    return Path("runs") / f"{kind}-{datetime.now():%Y%m%d-%H%M%S}"


@dataclass(frozen=True)
class CommandSettings(Config):
    """Settings of train_lean.py and more of a command, which chooses those in MANAGED_FLAGS by itself."""

    MANAGED_FLAGS: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def parse(cls, arguments: Sequence[str] | None = None, **defaults: Any) -> Self:
        """Read the command line, and the file of --config. SettingsError for what is wrong."""
        words = sys.argv[1:] if arguments is None else arguments
        base: Any
        base, flags = take_config(words, cls(**defaults))
        for flag in (word.partition("=")[0] for word in flags):
            if flag.removeprefix("--").replace("-", "_") in cls.MANAGED_FLAGS:
                raise SettingsError(f"{flag} is given, which is chosen by itself here: leave it out.")
        shown: Any = cls._without_managed_flags()
        return cls.of(tyro.cli(shown, args=flags, default=shown.of(base)))

    @classmethod
    def _without_managed_flags(cls) -> type:
        """The same settings, whose --help leaves out the flags that this command refuses."""
        hints, fields = get_type_hints(cls, include_extras=True), cls.__dataclass_fields__
        hidden = [
            (name, Annotated[hints[name], tyro.conf.Suppress], field(default=fields[name].default))
            for name in cls.MANAGED_FLAGS
        ]
        namespace = {"__doc__": cls.__doc__, "__module__": cls.__module__}
        return make_dataclass(cls.__name__, hidden, bases=(cls,), namespace=namespace, frozen=True)

    @property
    def train(self) -> Config:
        """The settings that train_lean.py knows."""
        return Config.of(self)


@dataclass(frozen=True)
class ModelChoice(Settings):
    """A causal language model: a named one, or with `arch` one that is made from numbers."""

    model: str = "auto"
    """Hub id or folder of the model whose shape is trained, from random weights; auto: rook-tiny."""
    arch: Literal["gpt2", "llama"] | None = None
    """Make a model of this architecture, with random weights, from the numbers below (lm)."""
    layers: Annotated[int, COUNT] = 4
    """Transformer blocks."""
    width: Annotated[int, COUNT] = 256
    """Residual width."""
    d_ff: Annotated[int | None, OR_NONE] = None
    """Width of the feed-forward layers; None: 4 times width (gpt2), 8/3 times, in steps of 64 (llama)."""
    heads: Annotated[int, COUNT] = 4
    """Attention heads."""
    kv_heads: Annotated[int | None, OR_NONE] = None
    """Heads of keys and values (llama); None: as many."""
    vocab: Annotated[int, COUNT] = 256
    """Entries of the vocabulary; 256 are bytes."""
    context: Annotated[int, COUNT] = 256
    """Tokens of a training window (lm); a model that is made reaches as many."""
    rope_theta: float = 10000.0
    """Base of the rotary positions (llama)."""
    untied: bool = False
    """An output head of its own instead of the embedding's transpose."""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.width % self.heads:
            yield f"width is {self.width}, not a multiple of {self.heads} heads: change one."
        if self.kv_heads is not None and self.heads % self.kv_heads:
            yield (
                f"kv_heads is {self.kv_heads}, no divisor of {self.heads} heads: give one, or leave it out."
            )
        if self.arch == "llama" and self.width // self.heads % 2:
            yield (
                f"heads of width {self.width // self.heads} cannot be rotated in pairs: "
                "choose width and heads so that one is a multiple of two of the other."
            )

    @property
    def model_name(self) -> str:
        if self.arch is not None:
            return f"{self.arch} {self.layers} x {self.width}, vocabulary {self.vocab}"
        return BUNDLED if self.model == "auto" else self.model


# The fields of a last base come first, also in the help: so a command's own flags are in such a class.


@dataclass(frozen=True)
class TaskFlags(Settings):
    """Language modelling, and settings of trials."""

    objective: Literal["grpo", "lm"] = "grpo"
    """grpo: what train_lean.py does. lm: plain language modelling on a text."""
    data: str | None = None
    """Text to learn from (lm), its last tenth held out; bundled: chess positions and moves, 0.8 MB."""
    prompt_tokens: Annotated[int | None, COUNT] = None
    """Make up all prompts, with so many tokens (grpo); None: take those of --prompts."""
    compile: bool = False
    """torch.compile the model (lm)."""
    tf32: bool = False
    """On CUDA, multiply fp32 matrices in TF32."""


@dataclass(frozen=True)
class Task(CommandSettings, ModelChoice, TaskFlags):
    """Steps of GRPO or of language modelling at one batch size, whose rows are all on the device at once."""

    MANAGED_FLAGS: ClassVar[tuple[str, ...]] = (
        "batch_size",
        "steps",
        "minutes",
        "rollout_rows",
        "score_rows",
        "resume",
        "dry_run",
        "device_memory",
        "name",
        "memory_utilization",
    )

    def conflicts(self) -> Iterator[str]:
        for conflict in super().conflicts():
            of_groups = conflict.startswith(("batch_size", "max_batch_size"))
            if self.objective == "grpo" or not of_groups:  # windows are in none
                yield conflict
        if self.objective == "grpo" and self.arch is not None:
            yield f"arch is {self.arch!r}, but grpo improves a model that can write already: give --model."
        if self.objective == "grpo" and self.compile:
            yield "compile is on, which is for --objective lm: leave it out for grpo."

    @property
    def multiple(self) -> int:
        """The number that batch sizes are multiples of."""
        return self.group_size if self.objective == "grpo" else 1

    @property
    def rows(self) -> int:
        """Rows in one backward pass."""
        return min(self.num_rows, self.train_rows or self.num_rows)

    def task(self, **changes: Any) -> "Task":
        """These settings for one process: nothing is saved, and rows that do not fit run out of memory."""
        return Task.of(
            self,
            memory_utilization=1.0,
            minutes=None,
            resume=None,
            dry_run=False,
            device_memory=None,
            checkpoint_interval=0,
            trackers=(),
            show_completions=0,
            **changes,
        )


@dataclass(frozen=True)
class FindMaxFlags(Settings):
    """How the largest batch is looked for."""

    strategy: Literal["line", "classic"] = "line"
    """line: what memory over the sizes tried allows, at most 8 trials. classic: 16 more or half."""
    start: Annotated[int, COUNT] = 64
    """Batch size of the first trial."""
    output: Path | None = None
    """Folder of the table, JSON and picture; None: runs/max-batch- and the time."""


@dataclass(frozen=True)
class FindMax(Task, FindMaxFlags):
    """The largest batch size that fits this device, by real training steps.

    Other flags are those of train_lean.py, which `--config FILE` holds, too.
    """

    MANAGED_FLAGS = (*Task.MANAGED_FLAGS, "train_rows")


@dataclass(frozen=True)
class Check(ModelChoice):
    """Measure training on this machine, and say which switches are off."""

    batch_size: Annotated[int, COUNT] = 8
    """Windows of --context tokens in a step."""
    steps: Annotated[int, COUNT] = 3
    """Steps that are timed, at least, after a first one that is not."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    precision: Precision = "auto"
    """Dtype of matrix products; auto: bf16 where native."""
    compile: bool = False
    """Time a compiled step as well: on a CPU compiling takes about a minute."""


LESS_THAN_ALL = Limit(lambda share: 0 <= share < 1, "give a share from 0 to below 1")


def _is_count(parameters: float) -> bool:
    return 1 <= parameters < 1e15


PARAMETERS = Limit(_is_count, "give a number of parameters, such as 8e9")
EACH_PARAMETERS = Limit(lambda models: all(map(_is_count, models)), PARAMETERS.remedy)


@dataclass(frozen=True)
class CalculatorFlags(Settings):
    """The card, and what is held on it besides what train_lean.py would."""

    gpu: str | None = None
    """A card such as h100; without it, all that are known are listed."""
    gpu_memory: Annotated[str | None, SIZE] = None
    """Instead of gpu: any card by the size it is sold with, such as 20GB."""
    gpus: Annotated[int, COUNT] = 1
    """Cards; totals are shown for 1, 2, 4 and 8 besides."""
    accumulate: Annotated[int, COUNT] = 1
    """Passes to an optimizer step; totals are so many times larger."""
    prompt_tokens: Annotated[int | None, COUNT] = None
    """Tokens of the longest prompt; None: as in --prompts."""
    frozen: Annotated[tuple[float, ...], tyro.conf.UseAppendAction, EACH_PARAMETERS] = ()
    """Parameters of a frozen model that stands beside, such as 8e9; give it once for each."""
    frozen_dtype: Literal["fp32", "bf16", "int8", "int4"] = "bf16"
    """Precision of the frozen models."""
    trainable: Annotated[float | None, PARAMETERS] = None
    """Parameters that are trained, such as 1e8: a budget from counts alone, of any trainer."""
    weights: Literal["bf16+master", "fp32", "bf16"] | None = None
    """Precision of trained parameters (counts alone). None: bf16+master, bf16 with a copy in fp32."""
    optimizer: Literal["adamw", "adamw-8bit", "sgd"] | None = None
    """The optimizer (counts alone). None: adamw."""
    overhead_share: Annotated[float | None, LESS_THAN_ALL] = None
    """Share of the card for what is no tensor. None: 0.08 with counts, with a model a CUDA context."""
    sample_memory: Annotated[str | None, SIZE] = None
    """Memory a sample, such as 450MB (counts alone)."""
    yaml: Path | None = None
    """Write profiles for train_lean.py --config FILE --profile NAME."""
    json: Path | None = None
    """Write all figures."""


@dataclass(frozen=True)
class Calculator(CommandSettings, CalculatorFlags):
    """The largest batch for a card, and its memory line by line; no device is needed.

    From a model, with the flags of train_lean.py, or with --trainable from counts of parameters alone.
    """

    MANAGED_FLAGS = ("device", "device_memory", "dry_run", "resume", "name", "shard", "memory_limit")

    max_batch_size: int = 65536
    """No larger batch is looked for."""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.gpu is not None and self.gpu_memory is not None:
            yield f"gpu is {self.gpu!r} and gpu_memory {self.gpu_memory!r}: give one of the two."
        for name in ("yaml", "json"):
            file = getattr(self, name)
            if file is not None and not file.parent.is_dir():
                yield f"{name} is {file}: there is no folder {file.parent}, make it first."
        names = ["prompt_tokens", "lora_rank"]
        remedy = "which counts alone do not know: leave it out, or --trainable"
        if self.trainable is None:
            names = ["weights", "optimizer", "sample_memory"]
            remedy = "but a model's memory is planned: leave it out, or give counts with --trainable instead"
        for name in names:
            if value := getattr(self, name):
                yield f"{name} is {value}, {remedy}."
        if self.trainable is not None and self.model != "auto":
            yield f"trainable is {self.trainable:g}, and there is a model, {self.model}: give one of the two."
