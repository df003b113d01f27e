"""A dataset on the Hugging Face hub: downloaded once, memory-mapped, its rows made prompts when drawn.

Left out on purpose: streaming, for datasets that are larger than the disk.
"""

import importlib
import re
from collections.abc import Iterator
from typing import Any

from loguru import logger

from grpo.data.maker import PromptMaker
from grpo.data.rows import from_record
from grpo.prompt import Prompt

_PART = r"[\w.-]+(?:\[[^\[\]]*\])?"
HUB_NAME = re.compile(rf"([\w.-]+/[\w.-]+)(?::([\w.-]+)(?=:))?(?::({_PART}(?:\+{_PART})*))?")
"""OWNER/NAME, perhaps a configuration, perhaps a split in the package's own words, such as train[:1000]."""
MANY_ROWS = 100_000
"""From which on it is said that reading takes a while: some 6,000 rows of chess a second, 20,000 of text."""
WAYS_OUT = "give a local file (--prompts FILE) or take the bundled positions (--prompts bundled)"


class HubRows:
    """The rows of a dataset, of which only those that are asked for are in memory.

    ValueError where the package, the network, or the dataset is not there.
    """

    def __init__(self, spec: str, maker: PromptMaker) -> None:
        try:
            datasets: Any = importlib.import_module("datasets")
        except ImportError as error:
            raise ValueError(
                f"the hub dataset {spec!r} needs the package datasets: pip install datasets, or {WAYS_OUT}"
            ) from error
        self._spec, self._maker = spec, maker
        match = HUB_NAME.fullmatch(spec)
        assert match is not None
        path, config, split = match.groups()
        try:
            self._rows: Any = datasets.load_dataset(path, config, split=split or "train")
        except Exception as error:
            raise ValueError(
                f"cannot read the hub dataset {spec!r} ({type(error).__name__}: {error}). "
                f"Is its name right, and the network up? If not, {WAYS_OUT}"
            ) from error
        if len(self._rows) >= MANY_ROWS and "[" not in spec:
            part = f"{spec if split else spec + ':train'}[:{MANY_ROWS}]"
            logger.info("reading {:,} rows of {}; a part, as {}, takes less", len(self._rows), spec, part)

    def numbered(self) -> Iterator[tuple[int, Prompt]]:
        """The prompts of all rows that can be used, with the row's number; the others are counted."""
        for number, record in enumerate(self._rows):
            for prompt in self._maker.make_or_count(f"{self._spec}:{number}", record, from_record):
                yield number, prompt

    def __getitem__(self, number: int) -> Prompt:
        """The prompt of a row that can be used."""
        (prompt,) = self._maker.make(f"{self._spec}:{number}", self._rows[number], from_record)
        return prompt
