"""Prompts streamed from the hub."""

import json
import sys
from typing import Any
from unittest import mock

import datasets
import pytest
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from prompt_lines import game_lines, ids

from grpo.data import hub as hub_module
from grpo.data import load_prompts
from grpo.data.intake import Intake
from grpo.data.load import is_file
from grpo.run.loading import prompt_room


class Hub:
    """`datasets.load_dataset` for rows at hand, noting what is asked for."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.asked = rows, list[tuple[str, str | None, str]]()

    def load_dataset(self, name: str, config: str | None = None, *, split: str, streaming: bool) -> Any:
        assert streaming
        self.asked.append((name, config, split))
        return datasets.IterableDataset.from_generator(lambda: iter(self.rows))


@pytest.fixture
def hub(monkeypatch) -> Hub:
    fake = Hub([{"text": line} for line in game_lines(70, 30)])
    monkeypatch.setattr(datasets, "load_dataset", fake.load_dataset)
    monkeypatch.setattr(hub_module, "BLOCK_ROWS", 16)
    return fake


@pytest.mark.parametrize(
    ("spec", "asked"),
    [("owner/name", ("owner/name", None, "train")), ("owner/name:test", ("owner/name", None, "test")),
     ("own.er/na-me_1:main:test", ("own.er/na-me_1", "main", "test"))],
)  # fmt: skip
def test_a_dataset_a_split_and_a_configuration_are_named_by_colons(hub, spec, asked):
    hub.rows = [{"prompt": f"{n} + {n} =", "answer": 2 * n} for n in range(40)]
    drawn = load_prompts(spec, seed=0, policy_share=0.5, heldout_share=0).draw(40)
    assert hub.asked == [asked] and not is_file(spec)
    assert sorted(ids(drawn)) == sorted(f"{spec}:{n}" for n in range(40))
    assert sorted(prompt.columns["answer"] for prompt in drawn) == list(range(0, 80, 2))


@pytest.mark.parametrize("block_rows", [7, 1000])
def test_a_stream_deals_each_row_once_an_epoch(hub, monkeypatch, block_rows):
    monkeypatch.setattr(hub_module, "BLOCK_ROWS", block_rows)
    source = load_prompts("owner/name", seed=0, policy_share=1.0, heldout_share=0.2)
    num_train = 70 - sum(p.task == "policy" for p in source.heldout)
    first, second, third = (ids(source.draw(num_train)) for _ in range(3))
    assert len(set(first)) == num_train and set(first) == set(second) == set(third)
    assert first != second != third and first != sorted(first, key=lambda row: int(row.split(":")[1]))
    assert not set(first) & set(ids(source.heldout))


@examples(12)
@given(st.integers(0, 9), st.integers(0, 130), st.integers(1, 130), st.sampled_from([None, 0.0, 0.3, 1.0]))
def test_a_stream_resumes_anywhere(hub, seed: int, before: int, after: int, share: float | None):
    source, resumed = (load_prompts("owner/name", seed=seed, policy_share=share) for _ in range(2))
    source.draw(before)
    state = json.loads(json.dumps(source.state()))
    expected = source.draw(after)
    resumed.restore(state)
    assert resumed.state() == state
    assert resumed.draw(after) == expected and resumed.state() == source.state()


def test_a_resumed_stream_skips_what_it_has_seen_and_holds_one_block(hub, monkeypatch):
    source, resumed = (load_prompts("owner/name", seed=0, policy_share=1.0) for _ in range(2))
    for _ in range(40):
        source.draw(1)
        assert all(len(lane._block or ()) <= 16 for lane in source._lanes.values())
    state, skipped, skip = source.state(), [], datasets.IterableDataset.skip
    assert state["lanes"]["policy"]["row"] >= 32
    monkeypatch.setattr(datasets.IterableDataset, "skip", lambda data, n: skipped.append(n) or skip(data, n))
    resumed.restore(state)
    resumed.draw(1)
    assert skipped == [state["lanes"]["policy"]["row"]]
    hub.rows = hub.rows[1:]  # another stream is none to go on with
    with pytest.raises(ValueError, match="same --prompts"):
        load_prompts("owner/name", seed=0, policy_share=1.0).restore(state)


def test_heldout_prompts_of_a_stream_come_from_its_first_rows(hub, monkeypatch, logged):
    monkeypatch.setattr(hub_module, "HEAD_ROWS", 50)
    source = load_prompts("owner/name", seed=0, heldout_share=0.3, heldout_count=5)
    numbers = [int(p.id.removeprefix("owner/name:")) for p in source.heldout]
    assert 5 <= len(numbers) <= 10 and max(numbers) < 50
    everything = load_prompts("owner/name", seed=0, heldout_share=0.3).heldout
    assert not {p.columns["fen"] for p in everything} & {p.columns["fen"] for p in source.draw(300)}
    assert any("in its first rows" in message for message in logged)


def test_the_head_ends_early_once_enough_is_held_out(hub, monkeypatch):
    monkeypatch.setattr(hub_module, "CHECKED_ROWS", 20)

    def num_read(share: float) -> int:
        with mock.patch.object(Intake, "prompts", autospec=True, side_effect=Intake.prompts) as read:
            load_prompts("owner/name", seed=0, heldout_share=share, heldout_count=2)
        return read.call_count

    assert 20 <= num_read(0.5) < 40 and num_read(0.0) == 20
    hub.rows = [{"text": line} for line in sorted(game_lines(70, 30))]  # the environment's first
    assert num_read(0.0) == 31  # until there is one of the other
    hub.rows = [{"prompt": f"{n}"} for n in range(100)]
    assert 20 <= num_read(0.5) < 40 and num_read(0.0) == 20


def test_a_streams_bad_rows_are_judged_after_the_first_thousand(hub, monkeypatch, logged):
    monkeypatch.setattr(hub_module, "CHECKED_ROWS", 50)
    good, bad = hub.rows, [{"text": "bad"}]
    hub.rows = bad + good  # all of the first row, 2% of the first 50
    load_prompts("owner/name", seed=0, max_bad_share=0.02)
    assert sum("1 of 101 rows" in message and "owner/name:0: " in message for message in logged) == 1
    later = good[:60] + bad + good
    for hub.rows, said in ((later, "1 of 61 rows.*owner/name:60: "), (bad + good[:9], "1 of 10 rows")):
        with pytest.raises(ValueError, match=said):  # a short one is judged at its end
            load_prompts("owner/name", seed=0)
    monkeypatch.setattr(hub_module, "HEAD_ROWS", 60)
    hub.rows = good[:60] + bad * 40  # and while training
    source = load_prompts("owner/name", seed=0, policy_share=1.0)
    with pytest.raises(ValueError, match=r"1 of 61 rows.*--max-bad-share"):
        source.draw(60)


def test_a_stream_skips_a_prompt_that_is_too_long_when_it_comes(hub, monkeypatch, logged):
    monkeypatch.setattr(hub_module, "HEAD_ROWS", 20)
    room = prompt_room("rook-tiny", 412)  # 100 tokens are left
    hub.rows = [{"prompt": f"{n} + {n} ="} for n in range(90)]
    hub.rows[50] = hub.rows[70] = {"prompt": "a" * 101}
    source = load_prompts("owner/name", seed=0, heldout_share=0, max_bad_share=0.03, room=room)
    assert not any(message.startswith("WARNING") for message in logged)
    assert sorted(ids(source.draw(88))) == sorted(f"owner/name:{n}" for n in range(90) if n not in (50, 70))
    (warning,) = [message for message in logged if message.startswith("WARNING")]
    assert "owner/name:50: a prompt of 101 tokens" in warning and "skipped" in warning
    monkeypatch.setattr(hub_module, "CHECKED_ROWS", 50)
    source = load_prompts("owner/name", seed=0, heldout_share=0, room=room)
    with pytest.raises(ValueError, match=r"1 of 51 rows.*owner/name:50: .*lower --max-new-tokens"):
        source.draw(88)


class BreakingOff(list):
    def __iter__(self) -> Any:
        yield {"prompt": "a"}
        raise ConnectionError("reset by peer")


def test_a_stream_of_nothing_useful_or_one_that_breaks_off_is_an_error(hub):
    for hub.rows, said in (
        ([], r"no prompts to train on in owner/name: give other"),
        ([{"question": "x"}] * 5, r"none of the columns.*question"),
        ([{"text": line} for line in game_lines(0, 9)], r"asks for policy prompts alone"),
        (BreakingOff(), r"ConnectionError: reset by peer.*--prompts bundled"),
    ):
        with pytest.raises(ValueError, match=said):
            load_prompts("owner/name", seed=0, policy_share=1.0)


def test_a_hub_out_of_reach_or_a_missing_package_is_told_with_the_ways_out(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"cannot read .*owner/name.*OfflineMode.*FILE.*--prompts bundled"):
        load_prompts("owner/name", seed=0)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install datasets, or .*--prompts bundled"):
        load_prompts("owner/name", seed=0)
