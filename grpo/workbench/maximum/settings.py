"""The settings of the search for the largest batch."""

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal

from grpo.config import SettingsError
from grpo.config.groups import Precision
from grpo.config.sizes import parse_size
from grpo.workbench.flags import (
    GradientCheckpointing,
    GroupSize,
    HasReference,
    LoraRank,
    MaxBatchSize,
    Objective,
)
from grpo.workbench.spec import ModelSpec

Strategy = Literal["predict", "classic"]


@dataclass(frozen=True)
class FindSettings:
    """The largest batch size that fits this device, by real training steps."""

    model: ModelSpec = field(default_factory=ModelSpec)
    objective: Objective = "grpo"
    """grpo: sample, score and learn, all rows at once. lm: plain language modelling on --data."""
    data: str | None = None
    """Text to learn from (lm); bundled: chess positions and moves, 0.8 MB."""
    strategy: Strategy = "predict"
    """predict: the memory model proposes, at most 4 trials. classic: 16 more or half."""
    start: int = 64
    """Batch size of the first trial."""
    max_batch_size: MaxBatchSize = 1024
    group_size: GroupSize = 8
    prompt_tokens: int = 60
    """Of every prompt (grpo)."""
    max_new_tokens: int = 144
    """Of every completion (grpo)."""
    kl: HasReference = True
    lora_rank: LoraRank = 0
    gradient_checkpointing: GradientCheckpointing = "auto"
    device: str = "auto"
    """auto, cpu, cuda, cuda:1."""
    precision: Precision = "auto"
    """Dtype of matrix products; auto: bf16 where native."""
    measured: tuple[str, ...] = ()
    """Try nothing: peaks measured elsewhere, such as 64=14.8GB 80=18.08GB 208=oom, with device_memory."""
    device_memory: str | None = None
    """With measured: all the memory of the device they were measured on, such as 47.4GB."""
    memory_limit: str | None = None
    """The most a trial may hold, such as 2GB; enforced on CUDA and on Linux."""
    output: Path | None = None
    """Folder of the table, JSON and picture; None: runs/max-batch- and the time."""

    def __post_init__(self) -> None:
        for name in ("start", "max_batch_size", "prompt_tokens", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} is {getattr(self, name)}: give at least 1.")
        if self.lora_rank < 0:
            raise SettingsError(f"lora_rank is {self.lora_rank}: give 0 or more.")
        if self.group_size < 2:
            raise SettingsError(f"group_size is {self.group_size}: give at least 2.")
        if self.max_batch_size < self.multiple:
            raise SettingsError(
                f"max_batch_size is {self.max_batch_size}, less than one group of {self.multiple}: give more."
            )
        for name in ("memory_limit", "device_memory"):
            try:
                parse_size(getattr(self, name) or "1GB")
            except ValueError as error:
                raise SettingsError(f"{name} is {error}") from error
        if bool(self.measured) != (self.device_memory is not None):
            raise SettingsError("measured and device_memory belong together: give both, or neither.")

    @property
    def multiple(self) -> int:
        return self.group_size if self.objective == "grpo" else 1

    def folder(self) -> Path:
        return self.output or Path("runs") / f"max-batch-{datetime.now():%Y%m%d-%H%M%S}"
