"""What a model's name means: the bundled one, a folder, a run, adapters on another, an id on the hub.

The hub's client tries six times for every file, half a minute without a network, with a warning each time. So
the hub is asked once whether it answers.
"""

import json
import logging
from functools import cache
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from loguru import logger

from grpo.config.groups import BUNDLED

BUNDLED_FOLDER = Path(__file__).parents[1] / "assets" / BUNDLED
ADAPTER_CONFIG = "adapter_config.json"
BASE_FOLDER = "base"
"""In a run's folder: the base of its adapters that is nowhere else as a whole."""
MODEL_FOLDER = "model"
"""In a run's folder: the model that it has come to."""
ANSWER_S = 10.0
"""How long is waited for the hub's answer."""

logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)


def source_of(name: str) -> str:
    """The folder, or the id on the hub, that a name means: of a run its model, or its newest checkpoint."""
    if name == BUNDLED:
        return str(BUNDLED_FOLDER)
    folder = Path(name)
    if any((folder / file).is_file() for file in ("config.json", ADAPTER_CONFIG)):
        return name
    of_run = [folder / MODEL_FOLDER, *sorted(folder.glob("checkpoints/step-*"), reverse=True)]
    return next((str(path) for path in of_run if path.is_dir()), name)


def base_of(name: str) -> str | None:
    """The base model's name where `name` means a folder of adapters.

    Where it was written the base may have been elsewhere: the bundled one, or a run's own, which is beside
    the adapters wherever the run is now. ValueError if the folder does not say of which model its adapters
    are, or holds a whole model, too.
    """
    folder = Path(source_of(name))
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        return None
    if whole := [path.name for path in folder.glob("model*.safetensors")]:
        raise ValueError(
            f"model {name!r} holds adapters ({ADAPTER_CONFIG}) and a whole model ({whole[0]}): move one of "
            "the two into a folder of its own, and name the one that is meant."
        )
    base = json.loads(file.read_text()).get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"model {name!r} holds adapters, but {ADAPTER_CONFIG} does not say of which model: add it."
        )
    if Path(base).is_dir():
        return str(base)
    if base.endswith(f"assets/{BUNDLED}"):
        return BUNDLED
    beside = [str(parent / BASE_FOLDER) for parent in list(folder.absolute().parents)[:2]]
    moved = [path for path in beside if Path(base).name == BASE_FOLDER and Path(path).is_dir()]
    return moved[0] if moved else str(base)


def findable(name: str) -> str:
    """A model's name as plain transformers finds it, from wherever."""
    source = source_of(name)
    return str(Path(source).resolve()) if Path(source).is_dir() else source


def may_be_hub_id(name: str) -> bool:
    """Whether a name can be OWNER/NAME or NAME on the hub: else a folder is meant, there or not."""
    return not name.startswith(("/", ".", "~")) and name.count("/") <= 1


def out_of_reach(name: str) -> bool:
    """Whether a model is to come from the hub, and that does not answer: what is here has to do."""
    return not Path(name).is_dir() and may_be_hub_id(name) and not _answers(name)


@cache
def _answers(name: str) -> bool:
    try:
        HfApi().model_info(name, timeout=ANSWER_S)
    except (HfHubHTTPError, HFValidationError):
        return True  # and whoever loads the model is told what is wrong
    except Exception as error:  # those of whichever library its client talks through
        logger.debug("the hub does not answer ({}: {})", type(error).__name__, error)
        return False
    return True
