"""What a model's name means: the bundled one, a folder, a run, adapters on another, an id on the hub."""

from pathlib import Path

from grpo.config.groups import BUNDLED
from grpo.model.adapters import CONFIG as ADAPTER_CONFIG
from grpo.model.adapters import base_named_in

BUNDLED_FOLDER = Path(__file__).parents[1] / "assets" / BUNDLED
MODEL_FOLDER = "model"
"""In a run's folder: the model that it has come to."""


def source_of(name: str) -> str:
    """The folder, or the id on the hub, that a name means: of a run its model, or its newest checkpoint."""
    if name == BUNDLED:
        return str(BUNDLED_FOLDER)
    folder = Path(name)
    if any((folder / file).is_file() for file in ("config.json", ADAPTER_CONFIG)):
        return name
    of_run = [folder / MODEL_FOLDER, *sorted(folder.glob("checkpoints/step-*"), reverse=True)]
    return next((str(each) for each in of_run if each.is_dir()), name)


def base_of(name: str) -> str | None:
    """The base model's name where `name` means a folder of adapters. ValueError if it does not say."""
    base = base_named_in(source_of(name))
    is_bundled = base is not None and base.endswith(f"assets/{BUNDLED}") and not Path(base).is_dir()
    return BUNDLED if is_bundled else base  # which was elsewhere where it was written


def findable(name: str) -> str:
    """A model's name as plain transformers finds it, from wherever."""
    source = source_of(name)
    return str(Path(source).resolve()) if Path(source).is_dir() else source
