"""Datasets on the hub: their rows become prompts when they are drawn."""

import json
import sys
from typing import Any

import datasets
import pytest
from prompt_lines import game_lines, ids, write

from grpo.data import load as load_module
from grpo.data import load_prompts
from grpo.data.load import is_file
from grpo.data.maker import RowParser

LOAD = datasets.load_dataset
LINES = [{"text": line} for line in game_lines(70, 30)]
SUMS = [{"prompt": f"{n} + {n} =", "answer": 2 * n} for n in range(40)]


@pytest.fixture
def on_hub(tmp_path, monkeypatch):
    """Puts rows where `datasets` finds them, and gives what it is asked for."""
    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(name: str, config: str | None = None, *, split: str) -> Any:
        asked.append((name, config, split))
        files = dict.fromkeys(("train", "test"), str(max(tmp_path.glob("*.jsonl"))))
        return LOAD("json", data_files=files, split=split, cache_dir=str(tmp_path))

    def put(rows: list[dict[str, Any]]) -> list[tuple[str, str | None, str]]:
        write(tmp_path / f"{len([*tmp_path.glob('*.jsonl')])}.jsonl", rows)
        return asked

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return put


@pytest.mark.parametrize(
    ("spec", "asked", "rows"),
    [
        ("owner/name", ("owner/name", None, "train"), SUMS),
        ("owner/name:test", ("owner/name", None, "test"), SUMS),
        ("own.er/na-me_1:main:test", ("own.er/na-me_1", "main", "test"), SUMS),
        ("owner/name:train[:7]", ("owner/name", None, "train[:7]"), SUMS[:7]),
        ("o/n:main:train[:25%]+test[38:]", ("o/n", "main", "train[:25%]+test[38:]"), SUMS[:10] + SUMS[38:]),
    ],
)
def test_a_dataset_a_part_of_it_and_a_configuration_are_named_by_colons(on_hub, spec, asked, rows):
    noted = on_hub(SUMS)
    drawn = load_prompts(spec, seed=0, policy_share=0.5, heldout_share=0).draw(len(rows))
    assert noted == [asked] and not is_file(spec)
    assert sorted(ids(drawn)) == sorted(f"{spec}:{n}" for n in range(len(rows)))
    assert sorted(prompt.columns["answer"] for prompt in drawn) == sorted(row["answer"] for row in rows)


def test_the_same_rows_come_as_from_a_file_made_when_they_are_drawn(on_hub, monkeypatch, tmp_path, logged):
    """And counted, held out and gone on with as those are."""
    rows = [*LINES, {"text": "bad"}]
    on_hub(rows)
    monkeypatch.setattr(load_module, "MANY_ROWS", 100)
    options = {"seed": 3, "heldout_share": 0.2, "heldout_count": 5, "max_bad_share": 0.02}
    source, resumed = (load_prompts("owner/name", **options) for _ in range(2))
    file = load_prompts(write(tmp_path / "file.jsonl", rows), **options)
    assert any("101 rows of owner/name; a part, as owner/name:train[:100], " in said for said in logged)
    assert any("1 of 101 rows" in said and "owner/name:100: " in said for said in logged)
    made, make = [], RowParser.make
    monkeypatch.setattr(RowParser, "make", lambda *given: made.append(given[1]) or make(*given))
    drawn = source.draw(50)
    resumed.restore(json.loads(json.dumps(source.state())))
    drawn += resumed.draw(100)  # more than an epoch
    assert made == ids(drawn)
    for some, others in ((drawn, file.draw(150)), (source.heldout, file.heldout)):
        assert [(p.text, p.columns) for p in some] == [(p.text, p.columns) for p in others]
    assert [p.text for p in source.longest(3)] == [p.text for p in file.longest(3)]
    with pytest.raises(ValueError, match=r"1 of 101 rows.*owner/name:100: "):
        load_prompts("owner/name", seed=0, max_bad_share=0)


def test_bad_rows_are_too_many_as_soon_as_they_are_more_than_all_may_have(on_hub):
    on_hub([{"text": "bad"}] * 5 + LINES)
    with pytest.raises(ValueError, match=r"3 of 3 rows.*owner/name:0: "):  # of 105 no more than 2 may be bad
        load_prompts("owner/name", seed=0, max_bad_share=0.02)


def test_a_checkpoint_of_a_stream_is_refused_with_the_way_out(on_hub):
    on_hub(LINES)
    state = load_prompts("owner/name", seed=0).state()
    streamed = {**state, "lanes": {task: {**lane, "row": 0} for task, lane in state["lanes"].items()}}
    with pytest.raises(ValueError, match=r"streamed its prompts .* new run from its weights.*--model"):
        load_prompts("owner/name", seed=0).restore(streamed)


def test_a_hub_out_of_reach_or_a_missing_package_is_told_with_the_ways_out(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"cannot read .*owner/name.*Offline.*FILE.*--prompts bundled"):
        load_prompts("owner/name", seed=0)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install datasets, or .*--prompts bundled"):
        load_prompts("owner/name", seed=0)
