"""From what a person types after `--prompts` to a source of prompts."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from loguru import logger

from grpo.config.groups import PromptSettings
from grpo.data.files import check_file, fill_columns, is_local, read_prompts
from grpo.data.hub import HubStream, StreamLane
from grpo.data.intake import Intake, Room
from grpo.data.rows import from_record
from grpo.data.source import Lane, MemoryLane, PromptSource, digest
from grpo.data.split import HELDOUT_SHARE, position, split
from grpo.prompt import Prompt

POSITIONS: Traversable = resources.files("grpo").joinpath("assets", "positions")
Rows = Iterable[Mapping[str, Any]]
"""Rows of columns in memory, such as a list of dictionaries or a `datasets.Dataset`."""
IN_MEMORY = "in-memory"
"""What stands in a run's settings for what has no name."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+){0,2}")


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
    intake = Intake(name, max_bad_share=max_bad_share, settings=settings, room=room)
    lanes: dict[str, Lane] = {}
    if is_stream := _is_hub_id(spec):
        stream = HubStream(name, intake)
        heldout, counts, rows_digest = stream.head(heldout_share, heldout_count)
        for task in counts:
            lanes[task] = StreamLane(stream, seed=seed, task=task, heldout_share=heldout_share)
    else:
        train, heldout = _read(spec, intake, heldout_share, heldout_count)
        counts = Counter(prompt.task for prompt in train)
        rows_digest = digest(train)
        for task in counts:
            mine = [prompt for prompt in train if prompt.task == task]
            lanes[task] = MemoryLane(mine, seed=seed, task=task)
    intake.report()
    if not counts and (to_train or not heldout):
        reason = "give other --prompts"
        if heldout:
            reason = "all of them are held out: lower --heldout-share"
        elif intake.num_rows > intake.num_bad:
            reason = f"none of its rows has a position to play from: {reason}"
        raise ValueError(f"no prompts to train on in {name}: {reason}")
    if "custom" not in counts and counts and settings is not None and settings.has_custom_prompts:
        raise ValueError(f"{name} holds chess positions: leave the settings of chats and templates out")
    share = _mixing_share(name, counts, policy_share) if counts else 0.0
    _announce(name, counts, heldout, partial=is_stream)
    return PromptSource(lanes, heldout, seed=seed, policy_share=share, rows_digest=rows_digest)


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
    return spec != "bundled" and not _is_hub_id(spec)


def _is_hub_id(spec: str | Rows) -> bool:
    if not isinstance(spec, str):
        return False
    return _HUB_ID.fullmatch(spec) is not None and not is_local(Path(spec).expanduser())


def _read(
    spec: str | Rows, intake: Intake, heldout_share: float, heldout_count: int
) -> tuple[list[Prompt], list[Prompt]]:
    """Training and held-out prompts of the bundle or of a local file."""
    if isinstance(spec, str) and spec == "bundled":
        train, heldout = (_bundled(name, intake) for name in ("train.txt", "heldout.txt"))
        assert not set(map(position, train)) & set(map(position, heldout)), "bundled files overlap"
        _, heldout = split(heldout, 1.0, heldout_count)
    else:
        if isinstance(spec, str):
            prompts = read_prompts(Path(spec).expanduser(), intake)
        else:
            made: list[Prompt] = []
            for number, row in enumerate(spec, start=1):
                if not isinstance(row, Mapping):
                    raise ValueError(_no_rows(spec, row))
                made += intake.prompts(f"row {number}", row, from_record)
            prompts = fill_columns(made)
        train, heldout = split(prompts, heldout_share, heldout_count)
    intake.check()
    return train, heldout


def _bundled(name: str, intake: Intake) -> list[Prompt]:
    file = POSITIONS.joinpath(name)
    if not file.is_file():
        raise ValueError(f"the bundled positions are incomplete, {file} is missing: install again")
    return read_prompts(file, intake)


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


def _announce(spec: str, counts: Counter[str], heldout: list[Prompt], *, partial: bool) -> None:
    held = Counter(prompt.task for prompt in heldout)
    tasks = (f"{counts[task]:,} {task} (held out {held[task]:,})" for task in sorted(counts | held))
    logger.info("prompts from {}{}: {}", spec, ", in its first rows" if partial else "", ", ".join(tasks))
