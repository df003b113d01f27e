"""Datasets on the hub: their rows become prompts when they are drawn."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from prompt_lines import game_lines, ids, write

from grpo.data import hub as hub_module
from grpo.data import load_prompts
from grpo.data.load import is_file
from grpo.data.maker import PromptMaker
from grpo.run.loading import prompt_room

LOAD = datasets.load_dataset


@pytest.fixture(scope="module")
def on_hub(tmp_path_factory):
    """Puts rows where `datasets` finds them, and gives what it is asked for."""
    folder = tmp_path_factory.mktemp("hub")
    asked: list[tuple[str, str | None, str]] = []
    loaded: dict[tuple[Path, str], Any] = {}
    files: list[Path] = []

    def load_dataset(name: str, config: str | None = None, *, split: str) -> Any:
        asked.append((name, config, split))
        if (files[-1], split) not in loaded:
            parts = dict.fromkeys(("train", "test"), str(files[-1]))
            loaded[files[-1], split] = LOAD("json", data_files=parts, split=split, cache_dir=str(folder))
        return loaded[files[-1], split]

    def put(rows: list[dict[str, Any]]) -> list[tuple[str, str | None, str]]:
        text = json.dumps(rows)
        files.append(folder / f"{hashlib.sha256(text.encode()).hexdigest()}.jsonl")
        write(files[-1], rows)
        asked.clear()
        return asked

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_dataset", load_dataset)
        yield put


LINES = [{"text": line} for line in game_lines(70, 30)]
SUMS = [{"prompt": f"{n} + {n} =", "answer": 2 * n} for n in range(40)]


@pytest.mark.parametrize(
    ("spec", "asked", "count"),
    [
        ("owner/name", ("owner/name", None, "train"), 40),
        ("owner/name:test", ("owner/name", None, "test"), 40),
        ("own.er/na-me_1:main:test", ("own.er/na-me_1", "main", "test"), 40),
        ("owner/name:train[:7]", ("owner/name", None, "train[:7]"), 7),
        ("owner/name:main:train[:25%]+test[38:]", ("owner/name", "main", "train[:25%]+test[38:]"), 12),
    ],
)
def test_a_dataset_a_part_of_it_and_a_configuration_are_named_by_colons(on_hub, spec, asked, count):
    noted = on_hub(SUMS)
    drawn = load_prompts(spec, seed=0, policy_share=0.5, heldout_share=0).draw(count)
    assert noted == [asked] and not is_file(spec)
    assert sorted(ids(drawn)) == sorted(f"{spec}:{n}" for n in range(count))
    rows = SUMS[:10] + SUMS[38:] if count == 12 else SUMS[:count]
    assert sorted(prompt.columns["answer"] for prompt in drawn) == sorted(row["answer"] for row in rows)


def test_the_same_rows_come_as_from_a_file_made_when_they_are_drawn(on_hub, tmp_path, monkeypatch, logged):
    on_hub([*LINES, {"text": "bad"}])
    monkeypatch.setattr(hub_module, "MANY_ROWS", 100)
    options = {"seed": 3, "heldout_share": 0.2, "heldout_count": 5, "max_bad_share": 0.02}
    source = load_prompts("owner/name", **options)
    file = load_prompts(str(write(tmp_path / "rows.jsonl", [*LINES, {"text": "bad"}])), **options)
    assert any("all 101 rows of owner/name; " in said and "train[:100]" in said for said in logged)
    assert any("1 of 101 rows" in said and "owner/name:100: " in said for said in logged)
    made, make = [], PromptMaker.make
    monkeypatch.setattr(PromptMaker, "make", lambda *given: made.append(given[1]) or make(*given))
    drawn = source.draw(150)  # more than an epoch
    assert made == ids(drawn)
    for prompts, others in ((drawn, file.draw(150)), (source.heldout, file.heldout)):
        assert [(prompt.text, prompt.columns) for prompt in prompts] == [
            (prompt.text, prompt.columns) for prompt in others
        ]
    assert [prompt.text for prompt in source.longest(3)] == [prompt.text for prompt in file.longest(3)]


@examples(12)
@given(st.integers(0, 9), st.integers(0, 130), st.integers(1, 130), st.sampled_from([None, 0.0, 0.3, 1.0]))
def test_it_resumes_anywhere(on_hub, seed: int, before: int, after: int, share: float | None):
    on_hub(LINES)
    source, resumed = (load_prompts("owner/name", seed=seed, policy_share=share) for _ in range(2))
    source.draw(before)
    state = json.loads(json.dumps(source.state()))
    expected = source.draw(after)
    resumed.restore(state)
    assert resumed.state() == state
    assert resumed.draw(after) == expected and resumed.state() == source.state()


def test_a_checkpoint_of_other_rows_or_of_a_stream_is_refused_with_the_way_out(on_hub):
    on_hub(LINES)
    state = load_prompts("owner/name", seed=0).state()
    streamed = {**state, "lanes": {task: {**lane, "row": 0} for task, lane in state["lanes"].items()}}
    with pytest.raises(ValueError, match=r"streamed its prompts .* new run from its weights.*--model"):
        load_prompts("owner/name", seed=0).restore(streamed)
    on_hub(LINES[1:])
    with pytest.raises(ValueError, match="same --prompts"):
        load_prompts("owner/name", seed=0).restore(state)


def test_a_prompt_that_is_too_long_and_what_is_of_no_use_is_known_at_once(on_hub, logged):
    room = prompt_room("rook-tiny", 412)  # 100 tokens are left
    on_hub([*SUMS[:30], {"prompt": "a" * 101, "answer": 0}, *SUMS[30:]])
    source = load_prompts("owner/name", seed=0, heldout_share=0, max_bad_share=0.03, room=room)
    assert sorted(ids(source.draw(40))) == sorted(f"owner/name:{n}" for n in range(41) if n != 30)
    (warning,) = [message for message in logged if message.startswith("WARNING")]
    assert "owner/name:30: a prompt of 101 tokens" in warning and "skipped" in warning
    with pytest.raises(ValueError, match=r"1 of 41 rows.*owner/name:30: .*lower --max-new-tokens"):
        load_prompts("owner/name", seed=0, room=room)
    for rows, said in (
        ([{"question": "x"}] * 5, r"5 of 5 rows.*none of the columns.*question"),
        ([{"text": line} for line in game_lines(0, 9)], r"asks for policy prompts alone"),
    ):
        on_hub(rows)
        with pytest.raises(ValueError, match=said):
            load_prompts("owner/name", seed=0, policy_share=1.0)


def test_a_hub_out_of_reach_or_a_missing_package_is_told_with_the_ways_out(monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", LOAD)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"cannot read .*owner/name.*Offline.*FILE.*--prompts bundled"):
        load_prompts("owner/name", seed=0)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install datasets, or .*--prompts bundled"):
        load_prompts("owner/name", seed=0)
