"""What a model's name means: the bundled one, a folder, a run, adapters on another, an id on the hub."""

from pathlib import Path

from grpo.config.groups import BUNDLED
from grpo.model.adapters import CONFIG as ADAPTER_CONFIG
from grpo.model.adapters import base_named_in

BUNDLED_FOLDER = Path(__file__).parents[1] / "assets" / BUNDLED
BASE_FOLDER = "base"
"""In a run's folder: the base of its adapters that is nowhere else as a whole."""
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
    """The base model's name where `name` means a folder of adapters. ValueError if it does not say.

    Where it was written the base may have been elsewhere: the bundled one, or a run's own, which is beside
    the adapters wherever the run is now.
    """
    source = source_of(name)
    base = base_named_in(source)
    if base is None or Path(base).is_dir():
        return base
    if base.endswith(f"assets/{BUNDLED}"):
        return BUNDLED
    beside = [folder / BASE_FOLDER for folder in list(Path(source).absolute().parents)[:2]]
    if Path(base).name == BASE_FOLDER:
        return next((str(folder) for folder in beside if folder.is_dir()), base)
    return base


def findable(name: str) -> str:
    """A model's name as plain transformers finds it, from wherever."""
    source = source_of(name)
    return str(Path(source).resolve()) if Path(source).is_dir() else source
