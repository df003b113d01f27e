"""Tasks of reasoning-gym as prompts: `--prompts gym:chain_sum?min_terms=2&max_digits=1`.

The package (Apache-2.0, `pip install reasoning-gym`) has over 100 generators of problems, each with a
function that scores an answer. A row is a problem, and its reward, unless another is named, the task's own
score of the answer that stands in the completion. A problem that the generator makes twice is one row, so
that none is trained on and held out, and intervals are of problems that differ.
"""

import dataclasses
import difflib
import importlib
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import yaml

from grpo.config import Config, SettingsError

PREFIX = "gym:"
SIZE, SEED = 10_000, 0
"""How many problems are made, and from which seed, unless the settings after the `?` say so."""
SCORE = "gym"
"""The name of the reward."""


def is_gym(spec: object) -> bool:
    """Whether a task of reasoning-gym is meant."""
    return isinstance(spec, str) and spec.startswith(PREFIX)


def rewards_for(prompts: object, reward: tuple[str, ...]) -> tuple[str, ...]:
    """The task's own score where prompts are a task's and `reward` is what it is when nobody has chosen."""
    return (SCORE,) if is_gym(prompts) and reward == Config.reward else reward


def make_dataset(spec: str) -> Any:
    """The dataset that `gym:NAME?setting=value&…` names; nothing of it has been made yet.

    SettingsError, with the nearest names, where the package, the task or a setting is not there, or the task
    does not take a value.
    """
    name, _, query = spec.removeprefix(PREFIX).partition("?")
    datasets = _factory().DATASETS
    if name not in datasets:
        raise SettingsError(
            f"prompts is {spec!r}, but reasoning-gym has no task {name!r}{_nearest(name, datasets)}."
        )
    _, config = datasets[name]
    names = [field.name for field in dataclasses.fields(config)]
    settings: dict[str, Any] = {"size": SIZE, "seed": SEED}
    for item in filter(None, query.split("&")):
        setting, equals, value = item.partition("=")
        if setting not in names or not equals:
            raise SettingsError(
                f"prompts is {spec!r}, but {name} has no setting {setting!r}{_nearest(setting, names)}; "
                f"it has {', '.join(names)}. Give them as {PREFIX}{name}?{names[0]}=…&…"
            )
        settings[setting] = yaml.safe_load(value)
    try:
        return _factory().create_dataset(name, **settings)
    except Exception as error:  # an assertion of the task's, or what a value of another type leads to
        reason = str(error) or type(error).__name__
        raise SettingsError(f"prompts is {spec!r}, which {name} does not take: {reason}.") from error


def gym_rows(spec: str, *, as_messages: bool) -> list[dict[str, Any]]:
    """The problems as rows: the question as `prompt` (a user's message, or text), and for rewards the columns
    `gym` (the task), `question`, `answer`, `difficulty` and `metadata`."""
    name = spec.removeprefix(PREFIX).partition("?")[0]
    problems = {problem["question"]: problem for problem in make_dataset(spec)}  # each once
    return [
        {
            "prompt": [{"role": "user", "content": question}] if as_messages else question,
            "gym": name,
            "question": question,
            "answer": problem["answer"],
            "difficulty": problem["metadata"].get("difficulty"),
            "metadata": problem["metadata"],
        }
        for question, problem in problems.items()
    ]


def gym_score(
    completions: Sequence[Any],
    gym: list[str],
    question: list[str],
    answer: list[Any],
    metadata: list[Any],
    **_: Any,
) -> list[float]:
    """Returns the tasks' own `score_answer` of the answer in each completion, from 0 to 1."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    columns = zip(texts, gym, question, answer, metadata, strict=True)
    return [
        float(
            _scorer(name)(
                extract_answer(text, solution), {"question": q, "answer": solution, "metadata": data}
            )
        )
        for text, name, q, solution, data in columns
    ]


def extract_answer(text: str, solution: Any) -> str:
    """The answer that a completion ends with: the last `<answer>…</answer>` or `\\boxed{…}`; else, where the
    solution is a number, the last number; else what follows the last "answer is" or ":"; else all of it.

    "2 + 3 is 5, so the answer is 5." has the answer "5".
    """
    for marked in (r"<answer>(.*?)</answer>", r"\\boxed\{([^{}]*)\}"):
        if matches := re.findall(marked, text, re.DOTALL):
            return matches[-1].strip()
    number = r"[-+]?\d[\d,]*(?:\.\d+)?(?:/\d+)?"
    if re.fullmatch(number, str(solution).strip()) and (numbers := re.findall(number, text)):
        return numbers[-1].replace(",", "")
    *_, last = re.split(r"answer is:?|:\s", text)
    return last.strip().rstrip(".") if last.strip() else text.strip()


@cache
def _scorer(name: str) -> Any:
    return _factory().get_score_answer_fn(name)


@cache
def _factory() -> Any:
    try:
        return importlib.import_module("reasoning_gym.factory")
    except ImportError as error:
        raise SettingsError(
            "prompts of reasoning-gym need its package: pip install reasoning-gym (one of its own packages "
            f"is compiled: {error.name} may want a C compiler)."
        ) from error


def _nearest(name: str, names: Any) -> str:
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""
