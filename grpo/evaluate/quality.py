"""Held-out quality before and after training, on the same prompts by the same uniforms: little shows much."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple

from grpo.config import Config
from grpo.config.groups import SamplingSettings
from grpo.data.reward_functions import RewardFunctions
from grpo.errors import UserError
from grpo.evaluate.evaluation import Evaluation, paired_difference
from grpo.evaluate.heldout import EVALUATION_STEP, evaluate
from grpo.model.load import Policy
from grpo.rollout.decoder import make_sampler
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.types import Prompt

FOLDER = "before-after"
"""In a run's folder."""
MODES = ("sampled", "greedy")
"""How answers are sampled: at the training temperature, and greedily."""
Quality = Mapping[str, Evaluation]
"""Held-out scores of one model, by mode."""
NAMES = {
    "reward": "reward",
    "policy/best_move": "the engine's best move",
    "policy/top5": "in the engine's top five",
    "policy/legal": "a legal move",
    "environment/next_state": "the next state, exactly",
}
"""Columns that are compared, as people call them; all are shown in percent."""
SEED, ROWS = 1234, 256
ASKED, SHOWN = 48, 3
"""Prompts of which answers are compared, and those that are shown."""


@dataclass(frozen=True)
class Example:
    """One prompt and what the model wrote, greedily."""

    prompt: str
    before: str
    after: str


class Change(NamedTuple):
    """A column's mean before and after, and the paired difference with its 95 % interval; in percent."""

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
    """Quality on `prompts`, judged by their labels; `reward` is a share of the most that `config` gives."""
    model = make_sampler(policy)
    rewards = RewardFunctions(config.reward, config.reward_weights)
    return {
        mode: reward_as_share(
            evaluate(
                model,
                policy.tokenizer,
                prompts,
                settings=SamplingSettings(config.max_new_tokens, temperature),
                rows=ROWS,
                seed=SEED,
                samples=samples,
                judge=rewards,
            ),
            rewards.weights,
        )
        for mode, temperature in zip(MODES, (config.temperature, 0.0), strict=True)
    }


def reward_as_share(evaluation: Evaluation, weights: Mapping[str, float]) -> Evaluation:
    """The evaluation with its reward divided by the most it can be on average, if each function gives 0 to 1.

    weights: of the functions, by name. A prompt has the weights of those that score it.
    """
    scores = evaluation.scores
    counts = {name: len(scores.get(f"rewards/{name}/mean", ())) for name in weights}
    most = sum(weights[name] * count for name, count in counts.items()) / max(
        1, len(scores.get("reward", ()))
    )
    if "reward" not in scores or most <= 0:
        return evaluation
    return Evaluation({**scores, "reward": scores["reward"] / most}, evaluation.prompts)


def answers(policy: Policy, config: Config, prompts: Sequence[Prompt]) -> list[str]:
    """Returns the model's greedy answers to the prompts."""
    settings = SamplingSettings(config.max_new_tokens, 0.0)
    uniforms = step_uniforms(len(prompts), settings.max_new_tokens, seed=SEED, step=EVALUATION_STEP)
    model = make_sampler(policy)
    return rollout(model, policy.tokenizer, prompts, uniforms, settings, rows=ROWS).texts


def changes(before: Quality, after: Quality) -> list[Change]:
    """Returns the change of each column in `NAMES` that both have."""
    rows = []
    for mode in MODES:
        was, now = before[mode], after[mode]
        for column in [name for name in NAMES if name in was.scores and name in now.scores]:
            figures = was.mean(column), now.mean(column), *paired_difference(was, now, column)
            rows.append(Change(mode, NAMES[column], *(100 * figure for figure in figures)))
    return rows


def in_words(changes: Sequence[Change]) -> list[str]:
    """By mode, what improved, what got worse, and what so few prompts cannot tell from chance."""
    sentences = []
    for mode in MODES:
        parts = []
        for verdict, words in (("better", "better"), ("worse", "worse"), ("open", "too close to tell")):
            named = [
                f"{row.name} ({row.change:+.1f})"
                for row in changes
                if (row.mode, row.verdict) == (mode, verdict)
            ]
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
    return [example for example in in_turn if example is not None][:SHOWN]


def save_quality(quality: Quality, folder: Path, name: str) -> None:
    for mode, evaluation in quality.items():
        evaluation.save(folder / f"{name}-{mode}.json")


def load_quality(folder: Path, name: str) -> Quality:
    """ValueError where it was not saved there, or was cut short."""
    return {mode: Evaluation.load(folder / f"{name}-{mode}.json") for mode in MODES}


def save(run: Path, before: Quality, after: Quality, shown: Sequence[Example]) -> None:
    """Saves both qualities and the examples in a run's folder, for its report."""
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    save_quality(before, folder, "before")
    save_quality(after, folder, "after")
    (folder / "examples.json").write_text(
        json.dumps([asdict(example) for example in shown]), encoding="utf-8"
    )


def load(run: Path) -> tuple[list[Change], list[Example]]:
    """Reads the files that `save` wrote, if there are any. ValueError for broken ones."""
    folder = run / FOLDER
    if not folder.is_dir():
        return [], []
    try:
        shown = [
            Example(**example)
            for example in json.loads((folder / "examples.json").read_text(encoding="utf-8"))
        ]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder / 'examples.json'} cannot be read ({error})") from error
    return changes(load_quality(folder, "before"), load_quality(folder, "after")), shown
