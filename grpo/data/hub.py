"""A dataset on the Hugging Face hub, streamed: bounded memory, and a place to resume at.

Rows are shuffled within blocks of consecutive rows, each block's order fixed by (seed, task, epoch,
block): the position is then a row number and a count, where a rolling shuffle buffer would have to
save its content. Each task reads the stream on its own: when one is used up faster than the other,
nothing piles up and nothing is dropped. Held-out prompts, and which tasks there are, come from the
first rows; later rows of the held-out side are passed over.
"""

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from grpo.data.intake import Intake
from grpo.data.rows import from_record
from grpo.data.source import digest, shuffled
from grpo.data.split import heldout_fraction, split
from grpo.prompt import Prompt

BLOCK_ROWS = 5_000
"""Rows shuffled together: the most a task holds in memory, and reads again when it is resumed."""
HEAD_ROWS = 20_000
"""First rows, searched for held-out prompts and for tasks."""
CHECKED_ROWS = 1_000
"""Rows seen before the share of bad ones is judged."""
WAYS_OUT = "give a local file (--prompts FILE) or take the bundled positions (--prompts bundled)"


class HubStream:
    """The rows of `owner/name[:[config:]split]`, from any row on."""

    def __init__(self, spec: str, intake: Intake) -> None:
        try:
            datasets: Any = importlib.import_module("datasets")
        except ImportError as error:
            raise ValueError(
                f"the hub dataset {spec!r} needs the package datasets: pip install datasets, or {WAYS_OUT}"
            ) from error
        self.spec = spec
        self._intake = intake
        self._num_seen = 0
        path, *parts = spec.split(":")  # OWNER/NAME, perhaps a configuration, perhaps a split
        name = parts[0] if len(parts) == 2 else None
        part = parts[-1] if parts else "train"
        self._dataset: Any = self._reach(
            lambda: datasets.load_dataset(path, name, split=part, streaming=True)
        )

    def rows(self, start: int) -> Iterator[list[Prompt]]:
        """The prompts of every row from `start` on: none where the row is bad.

        A row counts when it is first read. ValueError when too many were bad, or the hub fails.
        """
        records = self._reach(lambda: iter(self._dataset.skip(start)))
        number = start
        while (record := self._reach(lambda: next(records, None))) is not None:
            new = number >= self._num_seen
            prompts = self._intake.prompts(f"{self.spec}:{number}", record, from_record, counted=new)
            number += 1
            if new:
                self._num_seen = number
                if self._intake.num_rows >= CHECKED_ROWS:
                    self._intake.check()
            yield prompts

    def head(self, share: float, heldout_count: int) -> tuple[list[Prompt], Counter[str], str]:
        """Held-out prompts, training prompts of each task, and a digest, all of the first rows.

        Reads until both chess tasks, or a task of the user's own, have come and `heldout_count` of each
        are held out, if any are to be; at most `HEAD_ROWS`.
        """
        prompts: list[Prompt] = []
        num_seen: Counter[str] = Counter()
        num_heldout: Counter[str] = Counter()
        for row in islice(self.rows(0), HEAD_ROWS):
            prompts += row
            num_seen.update(prompt.task for prompt in row)
            num_heldout.update(prompt.task for prompt in row if heldout_fraction(prompt) < share)
            tasks = ("custom",) if "custom" in num_seen else ("policy", "environment")
            if self._intake.num_rows >= CHECKED_ROWS and all(
                num_seen[task] and (num_heldout[task] >= heldout_count or not share) for task in tasks
            ):
                break
        self._intake.check()
        train, heldout = split(prompts, share, heldout_count)
        rows_digest = digest(prompts[: CHECKED_ROWS // 2])
        return heldout, Counter(prompt.task for prompt in train), f"{rows_digest} {share}"

    def _reach(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            raise ValueError(
                f"cannot read the hub dataset {self.spec!r} ({type(error).__name__}: {error}). "
                f"Is its name right, and the network up? If not, {WAYS_OUT}"
            ) from error


class StreamLane:
    """One task's training prompts of a stream, a shuffled block at a time."""

    def __init__(self, stream: HubStream, *, seed: int, task: str, heldout_share: float) -> None:
        self._stream = stream
        self._seed = f"{seed} {task}"
        self._task = task
        self._heldout_share = heldout_share
        self._block: list[Prompt] | None = None
        self._begin(epoch=0, row=0, position=0)

    def take(self) -> Prompt:
        if self._block is None:
            self._block = self._read()
        while self._position >= len(self._block):
            self._block = self._next_block()
        prompt = self._block[self._position]
        self._position += 1
        return prompt

    def longest(self, count: int) -> list[Prompt]:
        return []  # a stream is not read ahead

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "row": self._row, "position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        self._begin(**state)

    def _begin(self, epoch: int, row: int, position: int) -> None:
        self._epoch, self._row, self._position = epoch, row, position
        self._rows = self._stream.rows(row)
        self._block = None

    def _next_block(self) -> list[Prompt]:
        if self._num_read == BLOCK_ROWS:
            self._row, self._position = self._row + BLOCK_ROWS, 0
        else:
            self._begin(epoch=self._epoch + 1, row=0, position=0)
        return self._read()

    def _read(self) -> list[Prompt]:
        """The block at `_row`, which is where `_rows` stands."""
        rows = list(islice(self._rows, BLOCK_ROWS))
        self._num_read = len(rows)
        if not rows and self._row == 0:
            raise ValueError(f"the hub dataset {self._stream.spec!r} has no rows any more: {WAYS_OUT}")
        mine = [prompt for row in rows for prompt in row if self._trains(prompt)]
        return [mine[index] for index in shuffled(len(mine), f"{self._seed} {self._epoch} {self._row}")]

    def _trains(self, prompt: Prompt) -> bool:
        return prompt.task == self._task and heldout_fraction(prompt) >= self._heldout_share
