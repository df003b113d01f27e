"""What is wrong with a model that cannot be loaded, or is not the one that its configuration describes."""

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from grpo.config.groups import BUNDLED
from grpo.model.hub import may_be_hub_id

LOADING_ERRORS = (OSError, ValueError, KeyError, SafetensorError, ImportError)
"""What transformers raises for what is not there, or not whole."""

logging.getLogger("transformers.modeling_utils").addFilter(  # a table of what is an error of ours
    lambda record: "LOAD REPORT" not in record.getMessage()
)


def check_whole(name: str, found: Mapping[str, Collection[Any]]) -> None:
    """ValueError unless all weights were there and were the model's; those that are tied need not be.

    found: what transformers says of the loading.
    """
    said = []
    for fault, what in (
        ("missing", "lacks"),
        ("mismatched", "has in another shape"),
        ("unexpected", "has besides"),
    ):
        names = sorted(each if isinstance(each, str) else each[0] for each in found[f"{fault}_keys"])
        if names:
            said.append(f"{what} {', '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)}")
    if said:
        raise ValueError(
            f"model {name!r} does not hold the weights of the causal language model that its config.json "
            f"describes: it {'; '.join(said)}. Give the folder of a whole one, saved as such (a classifier "
            "has no vocabulary head)."
        )


def cannot_load(name: str, error: Exception, quantized: str | None = None) -> str:
    """The remedy for whoever gave this name. quantized: by what the weights are."""
    if name == BUNDLED:
        return f"the bundled model is incomplete ({error}): install again."
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
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
