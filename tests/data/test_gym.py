"""Tasks of reasoning-gym as prompts and rewards; where it is not installed, a stand-in of its kind."""

import importlib.util
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from grpo import Trainer
from grpo.config import Config, SettingsError
from grpo.data import gym, load_prompts
from grpo.data.reward_files import resolve_max_new_tokens
from grpo.logs.tracking import read_lines

STAND_IN = """
import random
from dataclasses import dataclass


@dataclass
class SumConfig:
    min_terms: int = 2
    max_terms: int = 6
    max_digits: int = 4
    seed: int | None = None
    size: int = 500

    def validate(self):
        assert self.max_terms >= self.min_terms, "max_terms must be >= min_terms"


class Sums:
    def __init__(self, config):
        self.config = config

    def __len__(self):
        return self.config.size

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError
        draw = random.Random(self.config.seed + index)
        terms = [draw.randrange(10 ** self.config.max_digits) for _ in range(self.config.min_terms)]
        difficulty = {"num_terms": (self.config.min_terms, self.config.max_terms)}
        metadata = {"source_dataset": "chain_sum", "difficulty": difficulty}
        question = " + ".join(map(str, terms)) + " ="
        return {"question": question, "answer": str(sum(terms)), "metadata": metadata}

    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["answer"] else 0.01


DATASETS = {"chain_sum": (Sums, SumConfig), "basic_arithmetic": (Sums, SumConfig)}


def create_dataset(name, **settings):
    config = DATASETS[name][1](**settings)
    config.validate()
    return DATASETS[name][0](config)


def get_score_answer_fn(name):
    return Sums(SumConfig()).score_answer
"""


@pytest.fixture(autouse=True)
def reasoning_gym(tmp_path, monkeypatch):
    if importlib.util.find_spec("reasoning_gym") is None:
        package = tmp_path / "reasoning_gym"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "factory.py").write_text(STAND_IN)
        monkeypatch.syspath_prepend(tmp_path)
    yield
    forget_package()


def forget_package():
    gym._factory.cache_clear()
    gym._scorer.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "reasoning_gym"]:
        del sys.modules[name]


SPEC = "gym:chain_sum?min_terms=2&max_terms=2&max_digits=1&size=30"


def test_a_task_is_rows_that_its_settings_and_seed_decide():
    rows = gym.gym_rows(SPEC, as_messages=True)
    assert 20 < len(rows) <= 30 and rows == gym.gym_rows(SPEC, as_messages=True)
    assert rows != gym.gym_rows(SPEC + "&seed=100", as_messages=True)
    (message,) = rows[0]["prompt"]
    assert message == {"role": "user", "content": rows[0]["question"]}
    assert gym.gym_rows(SPEC, as_messages=False)[0]["prompt"] == rows[0]["question"]
    assert rows[0]["gym"] == rows[0]["metadata"]["source_dataset"] == "chain_sum"
    assert rows[0]["difficulty"]["num_terms"] == (2, 2)
    assert len(gym.make_dataset("gym:chain_sum")) == gym.SIZE


def test_the_score_is_the_tasks_own_of_the_answer_in_the_text():
    row = gym.gym_rows(SPEC, as_messages=True)[0]
    texts = [f"I add them up. The answer is {row['answer']}.", "I do not know."]
    talks = [[{"role": "assistant", "content": text}] for text in texts]
    columns = {name: [row[name]] * 2 for name in ("gym", "question", "answer", "metadata")}
    right, wrong = gym.gym_score(talks, **columns, difficulty=[None] * 2)
    assert right == 1.0 and 0 <= wrong < 0.1
    assert gym.gym_score(texts, **columns) == [right, wrong]


@pytest.mark.parametrize(
    "text, solution, expected",
    [
        ("2 + 3 is 5, so the answer is 5.", "5", "5"),
        ("It is 1,234.", "1234", "1234"),
        ("<answer>no</answer> <answer> yes </answer> or not", "yes", "yes"),
        (r"So \boxed{12} it is, not 13.", "12", "12"),
        ("-7", "-7", "-7"),
        ("The final answer is: olleh.", "olleh", "olleh"),
        ("olleh\n", "olleh", "olleh"),
        ("no number", "5", "no number"),
    ],
)
def test_the_answer_is_what_a_completion_ends_with(text, solution, expected):
    assert gym.extract_answer(text, solution) == expected


@pytest.mark.parametrize(
    "spec, expected",
    [
        ("gym:chain_sums", "no task 'chain_sums'; did you mean chain_sum"),
        ("gym:chain_sum?min_term=2", "no setting 'min_term'; did you mean min_terms"),
        ("gym:chain_sum?min_terms", "no setting 'min_terms'"),
        ("gym:chain_sum?min_terms=3&max_terms=2", "does not take: max_terms must be >= min_terms"),
        ("gym:chain_sum?min_terms=many", "which chain_sum does not take"),
    ],
)
def test_a_wrong_name_or_setting_is_one_line_with_the_nearest(spec, expected):
    with pytest.raises(SettingsError) as error:
        gym.make_dataset(spec)
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_without_the_package_it_is_named(monkeypatch):
    forget_package()
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(SettingsError, match="pip install reasoning-gym"):
        gym.make_dataset("gym:chain_sum")
    assert gym.is_gym("gym:x") and not gym.is_gym("owner/name") and not gym.is_gym(SimpleNamespace())


def test_a_problem_that_is_made_twice_is_there_once_and_on_one_side():
    source = load_prompts(SPEC.replace("size=30", "size=400"), seed=0, heldout_share=0.2)
    trained = [
        prompt.text for prompt in source.draw(sum(len(lane.numbers) for lane in source.lanes.values()))
    ]
    held_out = [prompt.text for prompt in source.heldout]
    every = trained + held_out
    assert held_out and trained and len({*every}) == len(every) < 400
    assert {prompt.task for prompt in source.heldout} == {"custom"}


def test_a_run_trains_on_a_task_by_its_own_score(config):
    """Its questions are text for a model without a chat template."""
    trainer = Trainer(replace(config, steps=1, prompts=SPEC, eval_interval=1))
    trainer.train()
    assert trainer.config.reward == ("gym",)
    (line,) = [line for line in read_lines(trainer.run.folder / "metrics.jsonl") if "reward" in line]
    assert line["reward"] == line["rewards/gym/mean"] < 0.1
    chosen = replace(config, prompts=SPEC, reward=("gym", "environment"))
    assert gym.rewards_for(chosen.prompts, chosen.reward) == ("gym", "environment")
    assert gym.rewards_for("bundled", Config.reward) == Config.reward


@pytest.mark.parametrize(
    ("given", "context", "tokens"),
    [
        ({}, 1024, 144),
        ({"reward": ("mine.py:f",)}, 1024, 144),  # on RookWorld's texts
        ({"prompts": "a.jsonl", "reward": ("mine.py:f",)}, 2048, 512),
        ({"prompts": SPEC, "reward": ("gym",)}, None, 512),
        ({"prompts": SPEC, "reward": ("gym",)}, 300, 150),
        ({"prompts": SPEC, "reward": ("gym",), "max_new_tokens": 144}, 2048, 144),
        ({"prompts": "games.pgn"}, 1024, 144),
    ],
)
def test_tasks_of_ones_own_have_room_to_answer_unless_a_number_is_given(given, context, tokens):
    assert resolve_max_new_tokens(Config(**given), context).max_new_tokens == tokens
