"""The order of prompts, their mix, and how a checkpoint resumes them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prompt_lines import QUIET, game_lines, ids, write

from grpo.data import Prompt, PromptSource, collate, load_prompts
from grpo.data.source import MemoryLane


@QUIET
@given(st.integers(1, 12), st.integers(0, 99), st.integers(1, 4))
def test_each_row_comes_once_an_epoch_in_a_new_order(count: int, seed: int, epochs: int) -> None:
    prompts = [Prompt(f"row:{n}", str(n), {}) for n in range(count)]
    lane = MemoryLane(prompts, seed=seed, task="custom")
    orders = [[lane.take().id for _ in range(count)] for _ in range(epochs)]
    assert all(sorted(order) == sorted(ids(prompts)) for order in orders)


def test_the_longest_prompts_are_known_for_each_lane_and_drawing_goes_on() -> None:
    def lane(task: str, *lengths: int) -> MemoryLane:
        return MemoryLane([Prompt(f"{task}:{n}", "x" * n, {}) for n in lengths], seed=0, task=task)

    def source(**lanes: Any) -> PromptSource:
        return PromptSource(lanes, [Prompt("held", "xxx", {})], seed=0, policy_share=0.5, rows_digest="")

    made = source(policy=lane("policy", 3, 9, 1, 7), environment=lane("environment", 2, 4))
    drawn = made.draw(3)
    assert ids(made.longest(2)) == ["policy:9", "policy:7", "environment:4", "environment:2"]
    again = source(policy=lane("policy", 3, 9, 1, 7), environment=lane("environment", 2, 4))
    assert drawn + made.draw(3) == again.draw(6)
    assert ids(source().longest(2)) == ["held"]  # of a stream, that is all that is known


def test_the_order_depends_on_seed_and_epoch() -> None:
    prompts = [Prompt(f"row:{n}", str(n), {}) for n in range(50)]
    lanes = [MemoryLane(prompts, seed=seed, task="custom") for seed in (0, 0, 1)]
    first, again, other = ([lane.take().id for _ in range(100)] for lane in lanes)
    assert first == again != other
    assert first[:50] != first[50:]
    assert first[:50] != ids(prompts)


@pytest.fixture(scope="module")
def mixed_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("prompts") / "mixed.txt", game_lines(30, 12))


@QUIET
@given(
    st.integers(0, 50),
    st.lists(st.integers(0, 20), max_size=6),
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.one_of(st.none(), st.floats(0, 1)),
)
def test_a_restored_source_goes_on_as_if_nothing_had_happened(
    mixed_file: str, seed: int, before: list[int], after: list[int], share: float | None
) -> None:
    source = load_prompts(mixed_file, seed=seed, policy_share=share)
    for count in before:
        source.draw(count)
    state = json.loads(json.dumps(source.state()))
    expected = [source.draw(count) for count in after]
    resumed = load_prompts(mixed_file, seed=seed, policy_share=share)
    resumed.draw(3)
    resumed.restore(state)
    assert resumed.state() == state
    assert [resumed.draw(count) for count in after] == expected
    assert resumed.state() == source.state()


def test_how_draws_are_cut_does_not_matter(mixed_file: str) -> None:
    one, other = (load_prompts(mixed_file, seed=3, policy_share=0.3) for _ in range(2))
    assert one.draw(60) == [prompt for count in (1, 7, 0, 52) for prompt in other.draw(count)]


def test_a_checkpoint_of_other_rows_or_another_seed_is_refused(mixed_file: str, tmp_path: Path) -> None:
    state = load_prompts(mixed_file, seed=3).state()
    with pytest.raises(ValueError, match=r"seed 3, not 4"):
        load_prompts(mixed_file, seed=4).restore(state)
    fewer = write(tmp_path / "mixed.txt", Path(mixed_file).read_text().splitlines()[:-1])
    with pytest.raises(ValueError, match=r"same --prompts"):
        load_prompts(fewer, seed=3).restore(state)
    moved = write(tmp_path / "mixed.txt", Path(mixed_file).read_text().splitlines())
    load_prompts(moved, seed=3).restore(state)  # the folder does not matter


@QUIET
@given(st.floats(0, 1), st.integers(1, 80))
def test_the_mix_is_even_at_every_point(mixed_file: str, share: float, count: int) -> None:
    tasks = [p.task for p in load_prompts(mixed_file, seed=0, policy_share=share).draw(count)]
    for drawn in range(1, count + 1):
        assert abs(tasks[:drawn].count("policy") - share * drawn) < 1 + 1e-9


def test_each_task_keeps_its_order_whatever_the_share(mixed_file: str) -> None:
    def policies(share: float, count: int) -> list[str]:
        source = load_prompts(mixed_file, seed=0, policy_share=share)
        return [p.id for p in source.draw(count) if p.task == "policy"]

    assert policies(0.5, 40)[:20] == policies(1.0, 20) == policies(0.25, 80)[:20]


def test_without_a_share_tasks_come_as_often_as_in_the_data(mixed_file: str) -> None:
    source = load_prompts(mixed_file, seed=0, heldout_share=0.0)
    assert source.heldout == []
    assert Counter(p.task for p in source.draw(42)) == {"policy": 30, "environment": 12}


def test_collate_gives_every_column_a_value_for_every_prompt(mixed_file: str) -> None:
    prompts = load_prompts(mixed_file, seed=0, policy_share=0.5).draw(4)
    columns = collate(prompts)
    assert list(columns) == ["task", "fen", "moves", "evals", "action", "history"]
    assert columns["task"] == ["environment", "policy"] * 2
    assert [moves is None for moves in columns["moves"]] == [True, False, True, False]
    assert [action is None for action in columns["action"]] == [False, True, False, True]
    assert list(collate(prompts[:1])) == list(columns)  # also where a draw has one task alone
    assert collate([]) == {}
    assert collate([Prompt("a", "x", {"b": 1}), Prompt("c", "y", {"d": 2})]) == {
        "b": [1, None],
        "d": [None, 2],
    }
