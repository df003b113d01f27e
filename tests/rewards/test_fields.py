"""Which letters of a completion a component judges."""

import pytest

from rewards import REWARDS
from rewards.formats import environment_field, policy_field

POLICY = " M: a1a2 b1b2 E: 0.1 -0.2 B: a1a2"
ENVIRONMENT = "8/8/8/8/8/8/8/K1k5 w - - 0 1+0.001+0+1"


@pytest.mark.parametrize(
    ("label", "field"), [("M:", "M: a1a2 b1b2 "), ("E:", "E: 0.1 -0.2 "), ("B:", "B: a1a2")]
)
def test_fields_of_a_policy_completion(label, field):
    start, end = policy_field(POLICY, label)
    assert POLICY[start:end] == field


def test_a_label_that_is_missing_is_everybodys_fault_and_of_two_the_first_counts():
    assert policy_field(" M: a1a2", "B:") == (0, 8)
    text = "B: a1a2 B: b1b2"
    assert policy_field(text, "B:") == (0, 8) and text[:8] == "B: a1a2 "


@pytest.mark.parametrize(
    ("fields", "text"), [((0, 1), "8/8/8/8/8/8/8/K1k5 w - - 0 1+"), ((1, 2), "0.001+"), ((2, 4), "0+1"),
                         ((0, 4), ENVIRONMENT)]
)  # fmt: skip
def test_fields_of_an_environment_completion(fields, text):
    start, end = environment_field(ENVIRONMENT, *fields)
    assert ENVIRONMENT[start:end] == text


def test_a_completion_of_too_few_fields_is_judged_as_a_whole():
    assert environment_field("8/8 w", 2, 4) == (0, 5)
    assert environment_field("8/8 w+0.1", 2, 4) == (0, 9)
    assert environment_field("8/8 w+0.1", 1, 2) == (6, 9)


@pytest.mark.parametrize("name", REWARDS)
def test_every_component_has_a_field_in_any_text(name):
    reward = REWARDS[name]
    for text in ("", "+", "B:", POLICY, ENVIRONMENT, "E: M:"):
        for component in reward.weights:
            start, end = reward.field_of(component, text)
            assert 0 <= start <= end <= len(text)
    assert reward.field_of("format", POLICY) == (0, len(POLICY))


def test_shares_add_up_to_the_reward():
    reward = REWARDS["environment"]
    row = {"format": 1.0, "fen_match": 0.5, "game_state": 0.0, "reward_value": 1.0}
    assert sum(reward.shares(row).values()) == pytest.approx(reward.mean(row))
    assert reward.shares({}) == {}
