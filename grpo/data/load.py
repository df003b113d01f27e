"""Opens the source of prompts that a person names after `--prompts`.

Left out on purpose: streaming, for datasets that are larger than the disk.
"""

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from loguru import logger

from grpo.config.groups import PromptSettings
from grpo.data.files import FORMATS, check_file, file_rows
from grpo.data.gym import gym_rows, is_gym, make_dataset
from grpo.data.maker import PLAIN, Convert, PromptBudget, RowParser
from grpo.data.rows import from_record
from grpo.data.source import HELDOUT_SHARE, PromptSource
from grpo.errors import UserError
from grpo.files import as_path
from grpo.prompt import Prompt

POSITIONS: Traversable = resources.files("grpo").joinpath("assets", "positions")
Rows = Iterable[Mapping[str, Any]]
"""Rows of columns in memory, such as a list of dictionaries or a `datasets.Dataset`."""
IN_MEMORY = "in-memory"
"""Stands in a run's settings for prompts or models that were given in memory."""
_PART = r"[\w.-]+(?:\[[^\[\]]*\])?"
HUB_NAME = re.compile(rf"([\w.-]+/[\w.-]+)(?::([\w.-]+)(?=:))?(?::({_PART}(?:\+{_PART})*))?")
"""OWNER/NAME, perhaps a configuration, perhaps a split in the package's own words, such as train[:1000]."""
MANY_ROWS = 100_000
"""From which on it is said that reading takes a while: some 6,000 rows of chess a second, 20,000 of text."""
WAYS_OUT = "give a local file (--prompts FILE) or take the bundled positions (--prompts bundled)"


def load_prompts(
    spec: str | Rows,
    *,
    seed: int,
    policy_share: float | None = None,
    heldout_share: float = HELDOUT_SHARE,
    heldout_count: int = 1_000,
    max_bad_share: float = 0.01,
    settings: PromptSettings = PLAIN,
    room: PromptBudget | None = None,
    to_train: bool = True,
) -> PromptSource:
    """The prompts that `spec` names.

    "bundled", a local file, a hub dataset "owner/name[:[config:]split]", or a task of reasoning-gym,
    "gym:name[?setting=value&…]".

    A `.txt` file and a column `text` hold RookWorld lines; a column `prompt` (of rows in memory, `.jsonl`,
    `.csv`, `.tsv`, `.parquet` or the hub) holds prompts of the user's own, the other columns going to the
    rewards; a column `fen` (with `moves` and `evals`, or `action` and `history`), `.fen`, `.epd` and `.pgn`
    hold positions. settings: which column is asked, and how.

    policy_share: of the prompts drawn; None is the share in the data. heldout_share: of positions; of
    the bundled ones it is 0.05. heldout_count: most held-out prompts of each task. room: rows
    whose prompts do not fit are skipped, as those are that cannot be read. to_train: whether there have to
    be some that are not held out.
    Shares are between 0 and 1, which those check who ask a person for them. ValueError, with the remedy,
    for every file and row that cannot be used, and for shares that this data cannot have.
    """
    check_spec(spec)
    name = spec if isinstance(spec, str) else "the prompts given"
    maker = RowParser(name, max_bad_share=max_bad_share, settings=settings, room=room)
    is_on_hub = isinstance(spec, str) and spec != "bundled" and not is_file(spec) and not is_gym(spec)
    numbered, prompt_of = _on_hub(name, maker) if is_on_hub else _in_memory(spec, maker)
    share = HELDOUT_SHARE if name == "bundled" else heldout_share
    source = PromptSource(prompt_of, seed=seed, heldout_share=share, heldout_count=heldout_count)
    for number, prompt in numbered:
        source.add(number, prompt)
    maker.check_bad_share()
    counts = Counter({task: len(lane.numbers) for task, lane in source.lanes.items()})
    held = Counter(prompt.task for prompt in source.heldout)
    if not counts and (to_train or not held):
        reason = "give other --prompts"
        if held:
            reason = "all of them are held out: lower --heldout-share"
        elif maker.num_rows > maker.num_bad:
            reason = f"none of its rows has a position to play from: {reason}"
        raise UserError(f"no prompts to train on in {name}: {reason}")
    if "custom" not in counts and counts and maker.settings.has_custom_prompts:
        raise UserError(f"{name} holds chess positions: leave the settings of chats and templates out")
    if counts:
        source.policy_share = _mixing_share(name, counts, policy_share)
    tasks = (f"{counts[task]:,} {task} (held out {held[task]:,})" for task in sorted(counts | held))
    logger.info("prompts from {}: {}", name, ", ".join(tasks))
    return source


def check_spec(spec: str | Rows) -> None:
    """ValueError for what is neither "bundled", a file that is there, a task, nor a hub dataset's name."""
    if not isinstance(spec, str):
        if isinstance(spec, Mapping) or not isinstance(spec, Iterable):
            raise UserError(_not_rows(type(spec).__name__))
    elif spec == IN_MEMORY:
        raise UserError(
            "the prompts of that run were rows in memory: give them again, here as --prompts FILE"
        )
    elif is_gym(spec):
        make_dataset(spec)
    elif is_file(spec):
        check_file(as_path(spec))


def _not_rows(kind: str) -> str:
    return (
        f"prompts is a {kind}: give rows, each a dictionary of columns, as a list such as "
        "[{'prompt': 'Say hello.'}], as one split of a datasets.Dataset without a format, or of a DataFrame "
        "frame.to_dict('records')."
    )


def is_file(spec: str) -> bool:
    """Whether a person means a file by it, there or not."""
    if is_gym(spec):
        return False
    path = as_path(spec)
    has_ending = path.parent.is_dir() and bool(re.fullmatch(r"\.[A-Za-z]{3,8}", path.suffix))
    looks_like_one = path.exists() or path.suffix.lower() in FORMATS or has_ending
    return spec != "bundled" and (HUB_NAME.fullmatch(spec) is None or looks_like_one)


Numbered = tuple[Iterable[tuple[int, Prompt]], Callable[[int], Prompt]]
"""All prompts, each with a number, and what gives the prompt of a number again."""


def _open_dataset(spec: str) -> Any:
    """The rows of a `datasets.Dataset`, of which only those that are asked for are in memory.

    ValueError where the package, the network, or the dataset is not there.
    """
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise UserError(
            f"the hub dataset {spec!r} needs the package datasets: pip install datasets, or {WAYS_OUT}"
        ) from error
    match = HUB_NAME.fullmatch(spec)
    assert match is not None
    path, config, split = match.groups()
    try:
        rows = datasets.load_dataset(path, config, split=split or "train")
    except Exception as error:
        raise UserError(
            f"cannot read the hub dataset {spec!r} ({type(error).__name__}: {error}). "
            f"Is its name right, and the network up? If not, {WAYS_OUT}"
        ) from error
    if len(rows) >= MANY_ROWS and "[" not in spec:
        part = f"{spec if split else spec + ':train'}[:{MANY_ROWS}]"
        logger.info("reading {:,} rows of {}; a part, as {}, takes less", len(rows), spec, part)
    return rows


def _on_hub(spec: str, maker: RowParser) -> Numbered:
    """Rows are made prompts when they are asked for: a dataset may be larger than memory."""
    rows = _open_dataset(spec)
    maker.total_rows = len(rows)

    def prompt_of(number: int) -> Prompt:
        (prompt,) = maker.make(f"{spec}:{number}", rows[number], from_record)
        return prompt

    made = (
        (n, maker.make_or_count(f"{spec}:{n}", row, from_record)) for n, row in enumerate(_readable(rows))
    )
    return ((number, prompt) for number, prompts in made for prompt in prompts), prompt_of


def _in_memory(spec: str | Rows, maker: RowParser) -> Numbered:
    prompts = [prompt for row in _rows(spec, maker) for prompt in maker.make_or_count(*row)]
    if isinstance(spec, str) and spec.lower().endswith(".pgn"):  # games share their openings
        prompts = list({prompt.text: prompt for prompt in reversed(prompts)}.values())[::-1]
    custom = [prompt.columns for prompt in prompts if prompt.task == "custom"]
    for name in dict.fromkeys(name for columns in custom for name in columns):
        for columns in custom:  # all have the same, None where a row left one out
            columns.setdefault(name)
    return enumerate(prompts), prompts.__getitem__


def _rows(spec: str | Rows, maker: RowParser) -> Iterator[tuple[str, Any, Convert]]:
    """Yields each row with its id and the function that makes prompts of it."""
    if isinstance(spec, str) and spec == "bundled":
        for file in (POSITIONS / "train.txt", POSITIONS / "heldout.txt"):
            if not file.is_file():
                raise UserError(f"the bundled positions are incomplete, {file} is missing: install again")
            yield from file_rows(file)
    elif isinstance(spec, str) and is_gym(spec):
        for number, problem in enumerate(gym_rows(spec, as_messages=maker.can_chat)):
            yield f"{spec}:{number}", problem, from_record
    elif isinstance(spec, str):
        yield from file_rows(as_path(spec))
    else:
        for number, row in enumerate(_readable(spec), start=1):
            if not isinstance(row, Mapping):
                raise UserError(_not_rows(f"{type(spec).__name__} of {type(row).__name__}"))
            yield f"row {number}", row, from_record


def _readable(rows: Rows) -> Iterator[Any]:
    """Yields rows one by one. ValueError where one cannot be read.

    A dataset of Hugging Face's decodes a row's images and sounds as it gives it, for which files or packages
    may be missing.
    """
    failures = (ImportError, OSError, RuntimeError, ValueError) if _is_dataset(rows) else ImportError
    try:
        yield from rows
    except failures as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"the prompts have a column that cannot be read ({reason}): install what it needs, or leave that "
            "column out, as by rows.remove_columns([...])"
        ) from error


def _is_dataset(rows: Rows) -> bool:
    return type(rows).__module__.split(".")[0] == "datasets"


def _mixing_share(spec: str, counts: Counter[str], policy_share: float | None) -> float:
    """The share of policy prompts to draw, where both tasks are there."""
    if "custom" in counts:
        if len(counts) > 1:
            raise UserError(f"{spec} mixes a `prompt` column with positions: give each a file of its own")
        return 0.0
    for task, extreme in (("policy", 1.0), ("environment", 0.0)):
        if policy_share == extreme and task not in counts:
            raise UserError(
                f"--policy-share {policy_share:g} asks for {task} prompts alone, and {spec} has none to "
                f"train on: use --policy-share {1 - extreme:g}, or other --prompts"
            )
    if policy_share is None:
        return counts["policy"] / counts.total()
    if len(counts) == 1 and 0 < policy_share < 1:
        logger.info("{} has {} prompts alone: --policy-share plays no part", spec, *counts)
    return policy_share
