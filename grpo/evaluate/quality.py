"""Held-out quality before and after training, on the same prompts by the same uniforms: little shows much."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple

from grpo.config import Config
from grpo.config.groups import SamplingSettings
from grpo.data.reward_functions import RewardFunctions
from grpo.evaluate.evaluation import Evaluation, paired_difference
from grpo.evaluate.heldout import EVALUATION_STEP, evaluate
from grpo.model.load import Policy
from grpo.model.weights import RolloutModel
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.types import Prompt

FOLDER = "before-after"
"""In a run's folder."""
MODES = ("sampled", "greedy")
NAMES = {
    "reward": "reward",
    "policy/best_move": "the engine's best move", "policy/top5": "in the engine's top five",
    "policy/legal": "a legal move", "environment/next_state": "the next state, exactly",
}  # fmt: skip
"""Columns that are compared, as people call them; all are shown in hundredths."""
SEED, ROWS = 1234, 256
ASKED, SHOWN = 48, 3
"""Prompts of which answers are compared, and those that are shown."""


@dataclass(frozen=True)
class Quality:
    """Held-out scores of one model: sampled at the training temperature, and greedy."""

    sampled: Evaluation
    greedy: Evaluation

    def save(self, folder: Path, name: str) -> None:
        for mode in MODES:
            getattr(self, mode).save(folder / f"{name}-{mode}.json")

    @staticmethod
    def load(folder: Path, name: str) -> "Quality":
        """ValueError where it was not saved there, or was cut short."""
        return Quality(*(Evaluation.load(folder / f"{name}-{mode}.json") for mode in MODES))


@dataclass(frozen=True)
class Example:
    """One prompt and what the model wrote, greedily."""

    prompt: str
    before: str
    after: str


class Change(NamedTuple):
    """A column's mean before and after, and the paired difference with its 95 % interval; in hundredths."""

    mode: str
    name: str
    before: float
    after: float
    change: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        return "better" if self.low > 0 else "worse" if self.high < 0 else "open"


def measure(policy: Policy, config: Config, prompts: Sequence[Prompt], *, samples: int) -> Quality:
    """Quality on `prompts`, judged by their labels; `reward` is the one that `config` trains on."""
    model = RolloutModel(policy.model, policy.target.dtype).model
    rewards = RewardFunctions(config.reward, config.reward_weights)

    def run(temperature: float, samples: int) -> Evaluation:
        settings = SamplingSettings(config.max_new_tokens, temperature)
        return evaluate(
            model, policy.tokenizer, prompts, settings=settings, rows=ROWS, seed=SEED,
            samples=samples, judge=rewards,
        )  # fmt: skip

    return Quality(run(config.temperature, samples), run(0.0, 1))


def answers(policy: Policy, config: Config, prompts: Sequence[Prompt]) -> list[str]:
    """Greedy ones."""
    settings = SamplingSettings(config.max_new_tokens, 0.0)
    uniforms = step_uniforms(len(prompts), settings.max_new_tokens, seed=SEED, step=EVALUATION_STEP)
    model = RolloutModel(policy.model, policy.target.dtype).model
    return rollout(model, policy.tokenizer, prompts, uniforms, settings, rows=ROWS).completions


def changes(before: Quality, after: Quality) -> list[Change]:
    """Of each column in `NAMES` that both have."""
    found = []
    for mode in MODES:
        was, now = getattr(before, mode), getattr(after, mode)
        for column, name in NAMES.items():
            if column in was.scores and column in now.scores:
                moved = paired_difference(was, now, column)
                figures = (100 * value for value in (was.mean(column), now.mean(column), *moved))
                found.append(Change(mode, name, *figures))
    return found


def in_words(found: Sequence[Change]) -> list[str]:
    """By mode, what improved, what got worse, and what so few prompts cannot tell from chance."""
    sentences = []
    for mode in MODES:
        parts = []
        for verdict, words in (("better", "better"), ("worse", "worse"), ("open", "too close to tell")):
            named = [f"{each.name} ({each.change:+.1f})" for each in found
                     if (each.mode, each.verdict) == (mode, verdict)]  # fmt: skip
            if named or verdict == "worse":
                parts.append(f"{words}: {', '.join(named) or 'nothing'}")
        sentences.append(f"{mode.capitalize()}, {'; '.join(parts)}.")
    return sentences


def examples(prompts: Sequence[Prompt], before: Sequence[str], after: Sequence[str]) -> list[Example]:
    """The first answers that differ, of either task in turn; not chosen by which is better."""
    by_task: dict[str, list[Example]] = {}
    for prompt, was, now in zip(prompts, before, after, strict=True):
        if was != now:
            by_task.setdefault(prompt.task, []).append(Example(prompt.text, was, now))
    in_turn = chain.from_iterable(zip_longest(*by_task.values()))
    return [each for each in in_turn if each is not None][:SHOWN]


def save(run: Path, before: Quality, after: Quality, shown: Sequence[Example]) -> None:
    """Into a run's folder, for its report."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    before.save(folder, "before")
    after.save(folder, "after")
    (folder / "examples.json").write_text(json.dumps([asdict(example) for example in shown]))


def load(run: Path) -> tuple[list[Change], list[Example]]:
    """What `save` wrote; nothing where nothing was. ValueError for what is broken."""
    folder = run / FOLDER
    if not folder.is_dir():
        return [], []
    try:
        shown = [Example(**example) for example in json.loads((folder / "examples.json").read_text())]
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{folder / 'examples.json'} cannot be read ({error})") from error
    return changes(Quality.load(folder, "before"), Quality.load(folder, "after")), shown
