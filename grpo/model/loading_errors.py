"""What is wrong with a model that cannot be loaded, or is not the one that its configuration describes."""

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from grpo.config.groups import BUNDLED
from grpo.memory import is_out_of_memory
from grpo.model.names import may_be_hub_id

LOADING_ERRORS = (OSError, ValueError, KeyError, SafetensorError, ImportError, RuntimeError)
"""What transformers, peft and sentencepiece raise for what is not there, or not whole."""

_VERBS = {"missing": "lacks", "mismatched": "has in another shape", "unexpected": "has besides"}


@contextmanager
def loading(name: str, quantized: str | None = None) -> Iterator[None]:
    """Inside, what is raised becomes a ValueError with a remedy; transformers' table of faults is not shown.

    quantized: by what the weights are.
    """
    log = logging.getLogger("transformers.modeling_utils")
    log.addFilter(_is_no_table)
    try:
        yield
    except LOADING_ERRORS as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(_remedy(name, error, quantized)) from error
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
        raise ValueError(
            f"model {name!r} does not hold the weights of the causal language model that its config.json "
            f"describes: it {'; '.join(faults)}. Give the folder of a whole one, saved as such (a classifier "
            "has no vocabulary head)."
        )


def _remedy(name: str, error: Exception, quantized: str | None) -> str:
    """For whoever gave this name."""
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
