"""The Hugging Face hub: which names can be of it, and whether it answers.

Its client tries six times for every file, half a minute without a network, with a warning each time.
"""

import logging
from functools import cache
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from loguru import logger

ANSWER_S = 10.0
"""How long is waited for an answer."""

logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)


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
