"""From what a person types after `--prompts` to a source of prompts."""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from loguru import logger

from grpo.config.groups import PromptSettings
from grpo.data.files import check_file, fill_columns, is_local, read_prompts
from grpo.data.hub import HUB_NAME, HubRows
from grpo.data.maker import PromptMaker, Room
from grpo.data.rows import from_record
from grpo.data.source import ByNumber, Lane, PromptSource, digest
from grpo.data.split import HELDOUT_SHARE, heldout_fraction, lowest_hashes, position
from grpo.prompt import Prompt

POSITIONS: Traversable = resources.files("grpo").joinpath("assets", "positions")
Rows = Iterable[Mapping[str, Any]]
"""Rows of columns in memory, such as a list of dictionaries or a `datasets.Dataset`."""
Numbered = Iterable[tuple[int, Prompt]]
IN_MEMORY = "in-memory"
"""What stands in a run's settings for what has no name."""


def load_prompts(
    spec: str | Rows,
    *,
    seed: int,
    policy_share: float | None = None,
    heldout_share: float = HELDOUT_SHARE,
    heldout_count: int = 1_000,
    max_bad_share: float = 0.01,
    settings: PromptSettings | None = None,
    room: Room | None = None,
    to_train: bool = True,
) -> PromptSource:
    """The prompts that `spec` names: "bundled", a local file, or a hub dataset "owner/name[:[config:]split]".

    A `.txt` file and a column `text` hold RookWorld lines; a column `prompt` (of rows in memory, `.jsonl`,
    `.csv`, `.tsv`, `.parquet` or the hub) holds prompts of the user's own, the other columns going to the
    rewards; a column `fen` (with `moves` and `evals`, or `action` and `history`), `.fen`, `.epd` and `.pgn`
    hold positions. settings: which column is asked, and how.

    policy_share: of the prompts drawn; None is the share in the data. heldout_share: of positions;
    the bundled ones are split already. heldout_count: most held-out prompts of each task. room: rows
    whose prompts do not fit are skipped, as those are that cannot be read. to_train: whether there have to
    be some that are not held out.
    Shares are between 0 and 1, which those check who ask a person for them. ValueError, with the remedy,
    for every file and row that cannot be used, and for shares that this data cannot have.
    """
    name = spec if isinstance(spec, str) else "the prompts given"
    check_spec(spec)
    maker = PromptMaker(name, max_bad_share=max_bad_share, settings=settings, room=room)
    if name == "bundled":
        train, heldout = _bundled(maker)
        sides = _Sides(train, enumerate(train), 0.0, heldout_count)
        sides.heldout = heldout
    elif isinstance(spec, str) and _is_on_hub(spec):
        rows = HubRows(spec, maker)
        sides = _Sides(rows, rows.numbered(), heldout_share, heldout_count)
    else:
        prompts = _read(spec, maker)
        sides = _Sides(prompts, enumerate(prompts), heldout_share, heldout_count)
    maker.check_bad_share()
    heldout = lowest_hashes(sides.heldout, heldout_count)
    counts = Counter({task: len(numbers) for task, numbers in sides.numbers.items()})
    if not counts and (to_train or not heldout):
        reason = "give other --prompts"
        if heldout:
            reason = "all of them are held out: lower --heldout-share"
        elif maker.num_rows > maker.num_bad:
            reason = f"none of its rows has a position to play from: {reason}"
        raise ValueError(f"no prompts to train on in {name}: {reason}")
    if "custom" not in counts and counts and maker.settings.is_own:
        raise ValueError(f"{name} holds chess positions: leave the settings of chats and templates out")
    share = _mixing_share(name, counts, policy_share) if counts else 0.0
    held = Counter(prompt.task for prompt in heldout)
    tasks = (f"{counts[task]:,} {task} (held out {held[task]:,})" for task in sorted(counts | held))
    logger.info("prompts from {}: {}", name, ", ".join(tasks))
    return PromptSource(
        sides.lanes(seed), heldout, seed=seed, policy_share=share, rows_digest=sides.rows_digest
    )


class _Sides:
    """Prompts parted in one pass: of those to train on numbers alone are kept, by task."""

    def __init__(
        self,
        prompts: ByNumber,
        numbered: Iterable[tuple[int, Prompt]],
        heldout_share: float,
        heldout_count: int,
    ) -> None:
        self._prompts = prompts
        self.numbers: dict[str, array[int]] = {}
        self._lengths: dict[str, array[int]] = {}
        self.heldout: list[Prompt] = []
        """At least the `heldout_count` of each task that have the lowest hashes."""
        self.rows_digest = digest(self._train(numbered, heldout_share, heldout_count))

    def _train(self, numbered: Numbered, heldout_share: float, heldout_count: int) -> Iterator[Prompt]:
        for number, prompt in numbered:
            if heldout_share and heldout_fraction(prompt) < heldout_share:
                self.heldout.append(prompt)
                if len(self.heldout) > 10_000 + 10 * heldout_count:  # the others are not used at all
                    self.heldout = lowest_hashes(self.heldout, heldout_count)
            else:
                self.numbers.setdefault(prompt.task, array("q")).append(number)
                self._lengths.setdefault(prompt.task, array("q")).append(len(prompt.text))
                yield prompt

    def lanes(self, seed: int) -> dict[str, Lane]:
        """By task."""
        return {
            task: Lane(self._prompts, numbers, self._lengths[task], seed=seed, task=task)
            for task, numbers in self.numbers.items()
        }


def check_spec(spec: str | Rows) -> None:
    """ValueError for what is neither "bundled", a file that is there, nor the name of a hub dataset."""
    if isinstance(spec, str) and spec == IN_MEMORY:
        raise ValueError(
            "the prompts of that run were rows in memory: give them again, here as --prompts FILE"
        )
    if isinstance(spec, str):
        if is_file(spec):
            check_file(Path(spec).expanduser())
    elif isinstance(spec, Mapping) or not isinstance(spec, Iterable):
        raise ValueError(_no_rows(spec))


def _no_rows(given: Any, row: Any = None) -> str:
    kind = type(given).__name__ + (f" of {type(row).__name__}" if row is not None else "")
    return (
        f"prompts is a {kind}: give rows, each a dictionary of columns, as a list such as "
        "[{'prompt': 'Say hello.'}], as one split of a datasets.Dataset without a format, or of a DataFrame "
        "frame.to_dict('records')."
    )


def is_file(spec: str) -> bool:
    """Whether a file is meant, there or not."""
    return spec != "bundled" and not _is_on_hub(spec)


def _is_on_hub(spec: str) -> bool:
    return HUB_NAME.fullmatch(spec) is not None and not is_local(Path(spec).expanduser())


def _read(spec: str | Rows, maker: PromptMaker) -> list[Prompt]:
    """Of a local file, or of rows in memory."""
    if isinstance(spec, str):
        return read_prompts(Path(spec).expanduser(), maker)
    prompts: list[Prompt] = []
    for number, row in enumerate(spec, start=1):
        if not isinstance(row, Mapping):
            raise ValueError(_no_rows(spec, row))
        prompts += maker.make_or_count(f"row {number}", row, from_record)
    return fill_columns(prompts)


def _bundled(maker: PromptMaker) -> tuple[list[Prompt], list[Prompt]]:
    """To train on, and held out."""
    files = [POSITIONS.joinpath(name) for name in ("train.txt", "heldout.txt")]
    if missing := [str(file) for file in files if not file.is_file()]:
        raise ValueError(f"the bundled positions are incomplete, {missing[0]} is missing: install again")
    train, heldout = (read_prompts(file, maker) for file in files)
    assert not set(map(position, train)) & set(map(position, heldout)), "bundled files overlap"
    return train, heldout


def _mixing_share(spec: str, counts: Counter[str], policy_share: float | None) -> float:
    """The share of policy prompts to draw, where both tasks are there."""
    if "custom" in counts:
        if len(counts) > 1:
            raise ValueError(f"{spec} mixes a `prompt` column with positions: give each a file of its own")
        return 0.0
    for task, extreme in (("policy", 1.0), ("environment", 0.0)):
        if policy_share == extreme and task not in counts:
            raise ValueError(
                f"--policy-share {policy_share:g} asks for {task} prompts alone, and {spec} has none to "
                f"train on: use --policy-share {1 - extreme:g}, or other --prompts"
            )
    if policy_share is None:
        return counts["policy"] / counts.total()
    if len(counts) == 1 and 0 < policy_share < 1:
        logger.info("{} has {} prompts alone: --policy-share plays no part", spec, *counts)
    return policy_share
