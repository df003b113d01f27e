"""A dataset on the Hugging Face hub: downloaded once, memory-mapped, its rows made prompts when drawn.

Left out on purpose: streaming, for datasets that are larger than the disk.
"""

import importlib
import re
from typing import Any

from loguru import logger

_PART = r"[\w.-]+(?:\[[^\[\]]*\])?"
HUB_NAME = re.compile(rf"([\w.-]+/[\w.-]+)(?::([\w.-]+)(?=:))?(?::({_PART}(?:\+{_PART})*))?")
"""OWNER/NAME, perhaps a configuration, perhaps a split in the package's own words, such as train[:1000]."""
MANY_ROWS = 100_000
"""From which on it is said that reading takes a while: some 6,000 rows of chess a second, 20,000 of text."""
WAYS_OUT = "give a local file (--prompts FILE) or take the bundled positions (--prompts bundled)"


def open_dataset(spec: str) -> Any:
    """The rows of a `datasets.Dataset`, of which only those that are asked for are in memory.

    ValueError where the package, the network, or the dataset is not there.
    """
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise ValueError(
            f"the hub dataset {spec!r} needs the package datasets: pip install datasets, or {WAYS_OUT}"
        ) from error
    match = HUB_NAME.fullmatch(spec)
    assert match is not None
    path, config, split = match.groups()
    try:
        rows = datasets.load_dataset(path, config, split=split or "train")
    except Exception as error:
        raise ValueError(
            f"cannot read the hub dataset {spec!r} ({type(error).__name__}: {error}). "
            f"Is its name right, and the network up? If not, {WAYS_OUT}"
        ) from error
    if len(rows) >= MANY_ROWS and "[" not in spec:
        part = f"{spec if split else spec + ':train'}[:{MANY_ROWS}]"
        logger.info("reading {:,} rows of {}; a part, as {}, takes less", len(rows), spec, part)
    return rows
