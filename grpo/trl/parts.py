"""A batch of TRL's in parts that add up to it: rows and columns, weights, metrics.

B rows, P prompt and C completion tokens, padded.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

OF_COMPLETIONS = (
    "completion_ids",
    "completion_mask",
    "tool_mask",
    "old_per_token_logps",
    "ref_per_token_logps",
    "sampling_per_token_logps",
    "importance_sampling_ratio",
)
"""Inputs that have a column for each completion token: (B, C)."""
OF_TEXTS = "token_type_ids", "mm_token_type_ids"
"""(B, P + C)."""
OF_IMAGES = (
    "pixel_values",
    "image_grid_thw",
    "image_position_ids",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_sizes",
    "num_images",
    "num_tiles",
)
MEANS_OVER_ROWS, MEANS_OVER_TOKENS = ("grpo", "sapo", "dr_grpo", "luspo"), ("bnpo",)
SUMS = "dapo", "cispo", "vespo"
"""Losses by what TRL divides them by: the batch's rows or tokens, or a count of the whole step's."""
LOSSES = *MEANS_OVER_ROWS, *MEANS_OVER_TOKENS, *SUMS


class Part(dict[str, Any]):
    """Some rows of a batch as TRL wants them, and which share of the batch they are."""

    def __init__(self, inputs: Mapping[str, Any], *, rows: int, tokens: int, of_rows: int, of_tokens: int):
        super().__init__(inputs)
        self.rows, self.tokens = rows, tokens
        self.row_share, self.token_share = rows / of_rows, tokens / max(1, of_tokens)
        self.is_last = False
        self.has_one_column = self["completion_ids"].size(1) == 1
        """Then TRL takes what is a number a token for a number a row."""
        self.loss: Tensor
        self.metrics: defaultdict[str, list[float]] = defaultdict(list)
        """Metrics that TRL has logged of it."""

    def weight(self, loss_type: str) -> float:
        """The share of its loss in the batch's."""
        if loss_type in SUMS:
            return 1.0
        return self.token_share if loss_type in MEANS_OVER_TOKENS else self.row_share


def parts(
    inputs: Mapping[str, Any],
    rows: int,
    *,
    multiple: int = 1,
    only: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
) -> Iterator[Part]:
    """The batch, so many rows at a time, longest completions first; without columns that only pad.

    multiple: of tokens that the batch was padded to. only: the rows that are in a part; shares are of all.
    groups: which of several prompts is each row's, where those of one prompt go together.
    """
    lengths = completion_lengths(inputs)
    counted = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    of_rows, tokens = len(lengths), counted.sum(1).tolist()
    order = lengths.argsort(descending=True, stable=True).tolist()
    if groups is not None:
        ranks = {group: rank for rank, group in enumerate(dict.fromkeys(groups[row] for row in order))}
        order.sort(key=lambda row: ranks[groups[row]])
    if only is not None:
        order = [row for row in order if row in only]
    samples = split_pixel_values_by_grid(dict(inputs))
    for start in range(0, len(order), rows):
        chosen = order[start : start + rows]
        taken = {name: _take(value, chosen) for name, value in samples.items()}
        columns = max(2, int(lengths[chosen].max()))
        part = Part(
            _without_padding(_together(taken), -(-columns // multiple) * multiple),
            rows=len(chosen),
            tokens=int(sum(tokens[row] for row in chosen)),
            of_rows=of_rows,
            of_tokens=int(sum(tokens)),
        )
        part.is_last = start + rows >= len(order)
        yield part


def rows_with_advantage(inputs: Mapping[str, Any]) -> list[int]:
    """Those whose advantage is not 0, which alone have a gradient without a KL or a bonus; at least one."""
    advantages = inputs["advantages"]  # (B,), or (B, C)
    return (advantages != 0).reshape(len(advantages), -1).any(1).nonzero().flatten().tolist() or [0]


def completion_lengths(inputs: Mapping[str, Any]) -> Tensor:
    """Tokens up to the last that is none of padding, (B,); 0 for a completion that is masked as a whole."""
    mask = inputs["completion_mask"]
    return (mask * torch.arange(1, mask.size(1) + 1, device=mask.device)).amax(1)


def _take(value: Any, rows: list[int]) -> Any:
    if isinstance(value, Tensor):
        return value[rows] if value.ndim else value
    return value if value is None else [value[row] for row in rows]


def _together(samples: dict[str, Any]) -> dict[str, Any]:
    """Some rows as a model takes them: without images where none has any."""
    if isinstance(samples.get("pixel_values"), list) and not any(samples["num_images"]):
        return {name: value for name, value in samples.items() if name not in OF_IMAGES}
    return unsplit_pixel_values_by_grid(samples)


def _without_padding(inputs: dict[str, Any], columns: int) -> dict[str, Any]:
    """On the right. What pads prompts, on the left, stays: positions are counted from there."""
    width = inputs["completion_ids"].size(1)
    padding = max(0, width - columns)
    widths = dict.fromkeys(OF_COMPLETIONS, width)
    widths |= dict.fromkeys(OF_TEXTS, width + inputs["prompt_ids"].size(1))

    def cut(name: str, value: Any) -> Any:
        is_padded = name in widths and value is not None and value.size(1) == widths[name]
        return value[:, : widths[name] - padding] if is_padded else value

    return {name: cut(name, value) for name, value in inputs.items()}


def merged(done: Sequence[Part], *, loss_type: str, by_sequence: bool) -> dict[str, tuple[float, float]]:
    """Returns for each metric what to sum, over parts and processes, and what to divide it by; see
    `combined`.

    by_sequence: ratios are a row's.
    """

    def pair(part: Part, name: str) -> tuple[float, float]:
        value = part.metrics[name][-1]
        if name == "policy_loss":
            return value * part.weight(loss_type), part.row_share / learned
        is_of_rows = name.startswith("vespo/") or (by_sequence and name not in ("kl", "entropy"))
        count = part.rows if is_of_rows or part.has_one_column else part.tokens
        return (value, 0.0) if is_extreme(name) else (value * count, float(count))

    learned = sum(part.row_share for part in done)  # 1 where no rows are left out
    names = sorted({name for part in done for name in part.metrics})
    return {name: combined(name, [pair(part, name) for part in done]) for name in names}


def combined(name: str, pairs: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Combines one metric's (sum, count) of parts or processes: their sums; (extreme, 0) of a `*_min` or
    `*_max`."""
    values, counts = zip(*pairs, strict=True)
    if not is_extreme(name):
        return sum(values), sum(counts)
    known = [value for value in values if not math.isnan(value)] or [math.nan]
    return (min(known) if name.endswith("_min") else max(known)), 0.0


def is_extreme(name: str) -> bool:
    return name.endswith(("_min", "_max"))


def fields_by_row(
    fields: Mapping[str, Any], images: Any, rows: int
) -> Callable[[slice], dict[str, Any]] | None:
    """Divides what a processor gives beside tokens among rows; None where it is not known how."""
    if not fields:
        return lambda part: {}
    batch = {name: value if isinstance(value, Tensor) else list(value) for name, value in fields.items()}
    if images is not None:
        batch["num_images"] = [len(of_row) if of_row else 0 for of_row in images]
    try:
        samples = split_pixel_values_by_grid(batch)
    except (KeyError, ValueError, RuntimeError, TypeError, AttributeError):
        return None
    if any(len(value) != rows for value in samples.values()):
        return None

    def of_rows(part: slice) -> dict[str, Any]:
        chosen = _together({name: value[part] for name, value in samples.items()})
        return {name: value for name, value in chosen.items() if name != "num_images"}

    return of_rows
