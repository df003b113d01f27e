"""Prompts streamed from the hub."""

import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_lines import QUIET, game_lines, ids

from grpo.data import Prompt, load_prompts
from grpo.data import hub as hub_module
from grpo.data.intake import Intake
from grpo.run.loading import prompt_room


class Hub:
    """`datasets.load_dataset` for rows at hand, counting how many are downloaded."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.asked: list[tuple[str, str]] = []

    def load_dataset(self, name: str, config: str | None = None, *, split: str, streaming: bool) -> Any:
        datasets: Any = importlib.import_module("datasets")

        assert streaming
        self.asked.append((name, split))
        return datasets.IterableDataset.from_generator(lambda: iter(self.rows))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    datasets = pytest.importorskip("datasets")
    fake = Hub([{"text": line} for line in game_lines(70, 30)])
    monkeypatch.setattr(datasets, "load_dataset", fake.load_dataset)
    monkeypatch.setattr(hub_module, "BLOCK_ROWS", 16)
    return fake


@pytest.mark.parametrize("block_rows", [7, 25, 50, 100, 1000])
def test_a_stream_deals_each_row_once_an_epoch(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, block_rows: int
) -> None:
    monkeypatch.setattr(hub_module, "BLOCK_ROWS", block_rows)
    source = load_prompts("jrahn/rookworld_7m", seed=0, policy_share=1.0, heldout_share=0.2)
    num_train = 70 - sum(p.task == "policy" for p in source.heldout)
    epochs = [ids(source.draw(num_train)) for _ in range(3)]
    assert all(len(set(epoch)) == num_train for epoch in epochs)
    assert set(epochs[0]) == set(epochs[1]) == set(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != sorted(epochs[0], key=lambda row: int(row.split(":")[1]))
    assert not set(epochs[0]) & set(ids(source.heldout))
    assert hub.asked == [("jrahn/rookworld_7m", "train")]


@settings(QUIET, max_examples=25)
@given(st.integers(0, 9), st.integers(0, 130), st.integers(1, 130), st.sampled_from([None, 0.0, 0.3, 1.0]))
def test_a_stream_resumes_anywhere(hub: Hub, seed: int, before: int, after: int, share: float | None) -> None:
    source = load_prompts("owner/name", seed=seed, policy_share=share)
    source.draw(before)
    state = json.loads(json.dumps(source.state()))
    expected = source.draw(after)
    resumed = load_prompts("owner/name", seed=seed, policy_share=share)
    resumed.restore(state)
    assert resumed.state() == state
    assert resumed.draw(after) == expected
    assert resumed.state() == source.state()


def test_a_resumed_stream_skips_what_it_has_seen(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets: Any = importlib.import_module("datasets")

    source = load_prompts("owner/name", seed=0, policy_share=1.0)
    source.draw(40)
    state = source.state()
    assert state["lanes"]["policy"]["row"] >= 32
    skipped: list[int] = []
    skip = datasets.IterableDataset.skip

    def noting(data: Any, count: int) -> Any:
        skipped.append(count)
        return skip(data, count)

    monkeypatch.setattr(datasets.IterableDataset, "skip", noting)
    resumed = load_prompts("owner/name", seed=0, policy_share=1.0)
    resumed.restore(state)
    resumed.draw(1)
    assert skipped == [0, state["lanes"]["policy"]["row"]]


def test_a_stream_holds_one_block_in_memory(hub: Hub) -> None:
    source = load_prompts("owner/name", seed=0, policy_share=0.1)
    for _ in range(100):
        source.draw(1)
        assert all(len(lane._block or ()) <= 16 for lane in source._lanes.values())  # type: ignore


def test_heldout_prompts_of_a_stream_come_from_its_first_rows(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(hub_module, "HEAD_ROWS", 50)
    source = load_prompts("owner/name:validation", seed=0, heldout_share=0.3, heldout_count=5)
    assert hub.asked == [("owner/name", "validation")]
    numbers = [int(p.id.removeprefix("owner/name:validation:")) for p in source.heldout]
    assert 5 <= len(numbers) <= 10 and max(numbers) < 50
    everything = load_prompts("owner/name:validation", seed=0, heldout_share=0.3).heldout
    fens = {p.columns["fen"] for p in everything}
    assert not fens & {p.columns["fen"] for p in source.draw(300)}
    assert any("in its first rows" in message for message in logged)


def test_the_head_ends_early_once_enough_is_held_out(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "CHECKED_ROWS", 20)
    prompts = Intake.prompts
    read: list[str] = []

    def counting(intake: Intake, row_id: str, *args: Any, **more: Any) -> list[Prompt]:
        read.append(row_id)
        return prompts(intake, row_id, *args, **more)

    def num_read(share: float) -> int:
        read.clear()
        load_prompts("owner/name", seed=0, heldout_share=share, heldout_count=2)
        return len(read)

    monkeypatch.setattr(Intake, "prompts", counting)
    assert 20 <= num_read(0.5) < 40
    assert num_read(0.0) == 20
    hub.rows = [{"text": line} for line in sorted(game_lines(70, 30))]  # the environment's first
    assert num_read(0.0) == 31  # until there is one of the other
    hub.rows = [{"prompt": f"{n}"} for n in range(100)]
    assert 20 <= num_read(0.5) < 40 and num_read(0.0) == 20


def test_a_streams_bad_rows_are_judged_after_the_first_thousand(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(hub_module, "CHECKED_ROWS", 50)
    good, bad = hub.rows, [{"text": "bad"}]
    hub.rows = bad + good  # all of the first row, 2% of the first 50
    load_prompts("owner/name", seed=0, max_bad_share=0.02)
    assert sum("1 of 101 rows" in message and "owner/name:0: " in message for message in logged) == 1
    hub.rows = good[:60] + bad + good
    with pytest.raises(ValueError, match=r"1 of 61 rows.*owner/name:60: "):
        load_prompts("owner/name", seed=0)
    hub.rows = bad + good[:9]  # a short one is judged at its end
    with pytest.raises(ValueError, match=r"1 of 10 rows"):
        load_prompts("owner/name", seed=0)
    monkeypatch.setattr(hub_module, "HEAD_ROWS", 60)
    hub.rows = good[:60] + bad * 40  # and while training
    source = load_prompts("owner/name", seed=0, policy_share=1.0)
    with pytest.raises(ValueError, match=r"1 of 61 rows.*--max-bad-share"):
        source.draw(60)


def test_a_stream_skips_a_prompt_that_is_too_long_when_it_comes(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(hub_module, "HEAD_ROWS", 20)
    room = prompt_room("rook-tiny", 412)  # 100 tokens are left
    hub.rows = [{"prompt": f"{n} + {n} ="} for n in range(90)]
    for row in (50, 70):
        hub.rows[row] = {"prompt": "a" * 101}
    source = load_prompts("owner/name", seed=0, heldout_share=0, max_bad_share=0.03, room=room)
    assert not any(message.startswith("WARNING") for message in logged)
    assert sorted(ids(source.draw(88))) == sorted(f"owner/name:{n}" for n in range(90) if n not in (50, 70))
    (warning,) = [message for message in logged if message.startswith("WARNING")]
    assert "owner/name:50: a prompt of 101 tokens" in warning and "skipped" in warning
    monkeypatch.setattr(hub_module, "CHECKED_ROWS", 50)
    source = load_prompts("owner/name", seed=0, heldout_share=0, room=room)
    with pytest.raises(ValueError, match=r"1 of 51 rows.*owner/name:50: .*lower --max-new-tokens"):
        source.draw(88)


def test_a_stream_of_nothing_useful_is_an_error(hub: Hub) -> None:
    hub.rows = []
    with pytest.raises(ValueError, match=r"no prompts to train on in owner/name: give other"):
        load_prompts("owner/name", seed=0)
    hub.rows = [{"question": "x"}] * 5
    with pytest.raises(ValueError, match=r"none of the columns.*question"):
        load_prompts("owner/name", seed=0)
    hub.rows = [{"text": line} for line in game_lines(0, 9)]
    with pytest.raises(ValueError, match=r"asks for policy prompts alone"):
        load_prompts("owner/name", seed=0, policy_share=1.0)


def test_a_stream_of_ones_own_prompts(hub: Hub) -> None:
    hub.rows = [{"prompt": f"{n} + {n} =", "answer": 2 * n} for n in range(40)]
    drawn = load_prompts("owner/name", seed=0, policy_share=0.5, heldout_share=0).draw(40)
    assert sorted(p.columns["answer"] for p in drawn) == list(range(0, 80, 2))


def test_a_changed_stream_is_not_resumed(hub: Hub) -> None:
    state = load_prompts("owner/name", seed=0).state()
    hub.rows = hub.rows[1:]
    with pytest.raises(ValueError, match="same --prompts"):
        load_prompts("owner/name", seed=0).restore(state)


def test_a_hub_out_of_reach_says_so_and_names_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"cannot read .*owner/name.*OfflineMode.*FILE.*--prompts bundled"):
        load_prompts("owner/name", seed=0)


def test_a_hub_that_fails_on_the_way_says_so(hub: Hub) -> None:
    kept = hub.rows

    class Failing(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from kept[:20]
            raise ConnectionError("reset by peer")

    hub.rows = Failing()
    with pytest.raises(ValueError, match=r"ConnectionError: reset by peer.*--prompts bundled"):
        load_prompts("owner/name", seed=0)


def test_without_the_package_datasets_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install datasets, or .*--prompts bundled"):
        load_prompts("owner/name", seed=0)
