"""What one process of the workbench trains: settings of train_lean.py, and what language modelling wants.

A trial of find-max, a size of a sweep and a try of a learning rate are tasks; `trial.py` does one.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import tyro

from grpo.config import Config, SettingsError, from_flat, to_flat
from grpo.config.groups import BUNDLED
from grpo.config.reading import take_config
from grpo.workbench.spec import MadeModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Objective = Literal["grpo", "lm"]
"""What is trained for: GRPO, or plain language modelling."""
T = TypeVar("T")


@dataclass(frozen=True)
class Task:
    """Steps at one batch size. `train` says everything that it says for a run, but the batch size of lm."""

    objective: Objective = "grpo"
    train: Config = field(default_factory=Config)
    batch_size: int = 64
    """Completions (grpo), or windows of `made.context` tokens (lm), a step."""
    made: MadeModel = field(default_factory=MadeModel)
    data: str | None = None
    compile: bool = False
    tf32: bool = False
    prompt_tokens: int | None = None
    """If given, all prompts are made up, with so many tokens, and rewards are drawn at random (grpo)."""

    @property
    def rows(self) -> int:
        """In one backward pass."""
        return min(self.batch_size, self.train.train_rows or self.batch_size)

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        flat = {item.name: getattr(self, item.name) for item in fields(self)}
        return flat | {"train": to_flat(self.train), "made": asdict(self.made)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Task":
        """What `as_json` made; other names are left aside."""
        known = {item.name: values[item.name] for item in fields(cls)}
        return cls(**{
            **known, "train": from_flat(values["train"]), "made": MadeModel(**values["made"]),
        })  # fmt: skip


def model_name(train: Config, made: MadeModel) -> str:
    """Of the model that is meant."""
    if made.arch is not None:
        return made.name
    return BUNDLED if train.model == "auto" else train.model


def check_objective(objective: Objective, made: MadeModel) -> None:
    """SettingsError for GRPO on a model that is made."""
    if objective == "grpo" and made.arch is not None:
        raise SettingsError(
            f"arch is {made.arch!r}, but grpo improves a model that can write already: give --model."
        )


def settled(train: Config, made: MadeModel) -> Config:
    """With the model that auto means on its device, as a run takes it. ValueError for a missing device."""
    if made.arch is not None:
        return train
    from grpo.model.target import choose_device, choose_model

    return replace(train, model=choose_model(train.model, choose_device(train.device)))


def model_shape(train: Config, made: MadeModel) -> "PretrainedConfig":
    """ValueError where a named model cannot be had."""
    if made.arch is not None:
        return made.config()
    from grpo.model.load import shape_of

    return shape_of(model_name(train, made))


def parse_flags(
    kind: type[T],
    base: Config,
    *,
    chosen: Sequence[str] = (),
    arguments: Sequence[str] | None = None,
    **defaults: Any,
) -> T:
    """Settings of a command whose field `train` has the flags of train_lean.py, over `--config FILE`.

    base: the defaults of `train`. chosen: flags of it that the command decides by itself, which nobody gives.
    SettingsError for bad ones.
    """
    base, words = take_config(sys.argv[1:] if arguments is None else arguments, base)
    for word in words:
        flag = word.partition("=")[0]
        if flag.removeprefix("--").replace("-", "_") in chosen:
            raise SettingsError(f"{flag} is given, which is chosen by itself here: leave it out.")
    make: Any = kind
    return tyro.cli(
        kind, args=words, default=make(train=base, **defaults), config=(tyro.conf.OmitArgPrefixes,)
    )


def alone(train: Config, **changes: Any) -> Config:
    """The settings of a run whose every row is on the device at once, or it has run out of memory."""
    return replace(
        train, memory_utilization=1.0, minutes=None, resume=None, dry_run=False, device_memory=None,
        checkpoint_interval=0, trackers=(), show_completions=0, **changes,
    )  # fmt: skip
