"""The settings of measuring what a machine reaches in training."""

from dataclasses import dataclass, field
from typing import Annotated

from grpo.config.groups import Precision
from grpo.config.limits import COUNT, check_limits
from grpo.workbench.spec import ModelSpec


@dataclass(frozen=True)
class PerformanceSettings:
    """Measure training on this machine, and say which switches are off."""

    model: ModelSpec = field(default_factory=ModelSpec)
    """The shape that is trained, from random weights."""
    batch_size: Annotated[int, COUNT] = 8
    """Windows of --context tokens in a step."""
    steps: Annotated[int, COUNT] = 3
    """Steps that are timed, after a first one that is not."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    precision: Precision = "auto"
    """Dtype of matrix products; auto: bf16 where native."""
    compile: bool = False
    """Time a compiled step as well: on a CPU compiling takes about a minute."""

    def __post_init__(self) -> None:
        check_limits(self)

    @property
    def context(self) -> int:
        """Tokens of a window: no more than the model reaches."""
        from grpo.workbench.models import context_of  # which loads torch

        return min(self.model.context, context_of(self.model.config()))
