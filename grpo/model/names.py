"""Resolves a model's name: the bundled one, a folder, a run, adapters on another, an id on the hub.

And says what is wrong with one that cannot be loaded. The hub is asked once whether it answers: its client
tries six times for every file, half a minute without a network, with a warning each time.
"""

import json
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from loguru import logger
from safetensors import SafetensorError

from grpo.config.groups import BUNDLED
from grpo.errors import UserError
from grpo.files import as_path
from grpo.memory import is_out_of_memory

BUNDLED_FOLDER = Path(__file__).parents[1] / "assets" / BUNDLED
ADAPTER_CONFIG = "adapter_config.json"
BASE_FOLDER = "base"
"""In a run's folder: the base of its adapters that is nowhere else as a whole."""
MODEL_FOLDER = "model"
"""In a run's folder: the model that it has come to."""
ANSWER_S = 10.0
"""How long is waited for the hub's answer."""
LOADING_ERRORS = (OSError, ValueError, KeyError, SafetensorError, ImportError)
"""Errors of transformers for models that are not there, or not whole."""

_VERBS = {"missing": "lacks", "mismatched": "has in another shape", "unexpected": "has besides"}

logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)


def source_of(name: str) -> str:
    """The folder, or the id on the hub, that a name means: of a run its model, or its newest checkpoint."""
    if name == BUNDLED:
        return str(BUNDLED_FOLDER)
    folder = as_path(name)
    if any((folder / file).is_file() for file in ("config.json", ADAPTER_CONFIG)):
        return str(folder)
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
        raise UserError(
            f"model {name!r} holds adapters ({ADAPTER_CONFIG}) and a whole model ({whole[0]}): move one of "
            "the two into a folder of its own, and name the one that is meant."
        )
    base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise UserError(
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


@contextmanager
def loading(name: str, quantized: str | None = None, *, is_tokenizer: bool = False) -> Iterator[None]:
    """Inside, what is raised becomes a ValueError with a remedy; transformers' table of faults is not shown.

    quantized: by what the weights are.
    """
    more = [RuntimeError] if is_tokenizer or quantized else []  # sentencepiece's, and of those that quantize
    log = logging.getLogger("transformers.modeling_utils")
    log.addFilter(_is_no_table)
    try:
        yield
    except (*LOADING_ERRORS, *more) as error:
        if is_out_of_memory(error):
            raise
        raise UserError(_remedy(name, error, quantized)) from error
    finally:
        log.removeFilter(_is_no_table)


def _is_no_table(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


def check_whole(name: str, report: Mapping[str, Collection[Any]]) -> None:
    """ValueError unless all weights were there and were the model's; those that are tied need not be.

    report: what transformers says of the loading.
    """
    faults = []
    for fault, verb in _VERBS.items():
        names = sorted(key if isinstance(key, str) else key[0] for key in report[f"{fault}_keys"])
        if names:
            faults.append(f"{verb} {', '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)}")
    if faults:
        raise UserError(
            f"model {name!r} does not hold the weights of the causal language model that its config.json "
            f"describes: it {'; '.join(faults)}. Give the folder of a whole one, saved as such (a classifier "
            "has no vocabulary head)."
        )


def _remedy(name: str, error: Exception, quantized: str | None) -> str:
    """The remedy for whoever gave this name."""
    if name == BUNDLED:
        return f"the bundled model is incomplete ({error}): install again."
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if quantized is not None:
        return (
            f"model {name!r} has weights that are quantized ({quantized}), which cannot be loaded here "
            f"({reason.rstrip('.')}): install what it names and give --lora-rank 16, without which such "
            "weights cannot be trained at all, or give the model that they were quantized from."
        )
    if isinstance(error, ImportError):
        return f"model {name!r} needs a package that is not installed: {reason}"
    if Path(name).is_dir():
        return f"model folder {name!r} does not hold a causal language model in safetensors: {reason}"
    if not may_be_hub_id(name):
        return f"model is {name!r}: there is no such folder."
    return (
        f"model {name!r} is no local folder and could not be fetched from the Hugging Face hub ({reason}). "
        f"Two ways out: download it where there is a network (hf download {name} --local-dir FOLDER) and "
        f"give the folder as the model, or take the bundled one, {BUNDLED}."
    )
