"""The settings of the search for the largest batch."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from grpo.config import SettingsError
from grpo.config.limits import COUNT
from grpo.config.sizes import parse_size
from grpo.workbench.flags import StepFlags

Strategy = Literal["predict", "classic"]


@dataclass(frozen=True)
class FindSettings(StepFlags):
    """The largest batch size that fits this device, by real training steps."""

    data: str | None = None
    """Text to learn from (lm); bundled: chess positions and moves, 0.8 MB."""
    strategy: Strategy = "predict"
    """predict: the memory model proposes, at most 4 trials. classic: 16 more or half."""
    start: Annotated[int, COUNT] = 64
    """Batch size of the first trial."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1."""
    measured: tuple[str, ...] = ()
    """Try nothing: peaks measured elsewhere, such as 64=14.8GB 80=18.08GB 208=oom, with device_memory."""
    device_memory: str | None = None
    """With measured: all the memory of the device they were measured on, such as 47.4GB."""
    memory_limit: str | None = None
    """The most a trial may hold, such as 2GB; enforced on CUDA and on Linux."""
    output: Path | None = None
    """Folder of the table, JSON and picture; None: runs/max-batch- and the time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("memory_limit", "device_memory"):
            try:
                parse_size(getattr(self, name) or "1GB")
            except ValueError as error:
                raise SettingsError(f"{name} is {error}") from error
        if bool(self.measured) != (self.device_memory is not None):
            raise SettingsError("measured and device_memory belong together: give both, or neither.")

    def folder(self) -> Path:
        return self.output or Path("runs") / f"max-batch-{datetime.now():%Y%m%d-%H%M%S}"
