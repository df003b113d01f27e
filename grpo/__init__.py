"""GRPO whose batch always fits: `Trainer` and `Config`, and the parts alone (docs/python.md).

Nothing large is imported before it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo.config import Config
    from grpo.config.groups import (
        LoraSettings,
        LossSettings,
        OptimizerSettings,
        PromptSettings,
        SamplingSettings,
    )
    from grpo.trainer import Trainer
    from grpo.types import Step

__all__ = [
    "Config",
    "LoraSettings",
    "LossSettings",
    "OptimizerSettings",
    "PromptSettings",
    "SamplingSettings",
    "Step",
    "Trainer",
]
_PLACES = {"Config": "grpo.config", "Trainer": "grpo.trainer", "Step": "grpo.types"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "Trainer":
        from grpo.environment import set_library_defaults

        set_library_defaults()  # before torch is loaded, if it is not yet
    return getattr(import_module(_PLACES.get(name, "grpo.config.groups")), name)
