"""What --prompts may name, shares, the bundle."""

from collections import Counter
from pathlib import Path

import pytest
from prompt_lines import ENVIRONMENT_LINE, START, game_lines, ids, write, write_records

from grpo.data import load as load_module
from grpo.data import load_prompts


def test_a_share_of_one_task_is_moot_and_said_once(tmp_path: Path, logged: list[str]) -> None:
    spec = write(tmp_path / "lines.txt", game_lines(20, 0))
    source = load_prompts(spec, seed=0, policy_share=0.25, heldout_share=0)
    assert {p.task for p in source.draw(20)} == {"policy"}
    assert sum("plays no part" in message for message in logged) == 1


@pytest.mark.parametrize(("policy", "environment", "share"), [(9, 0, 0.0), (0, 9, 1.0)])
def test_a_share_of_a_missing_task_is_an_error(
    tmp_path: Path, policy: int, environment: int, share: float
) -> None:
    spec = write(tmp_path / "lines.txt", game_lines(policy, environment))
    with pytest.raises(
        ValueError, match=rf"--policy-share {share:g} asks .*use --policy-share {1 - share:g}"
    ):
        load_prompts(spec, seed=0, policy_share=share, heldout_share=0)


def test_prompts_of_ones_own_and_positions_do_not_mix(tmp_path: Path) -> None:
    path = write_records(tmp_path / "both.jsonl", [{"prompt": "a"}, {"fen": START}])
    with pytest.raises(ValueError, match=r"mixes a `prompt` column with positions"):
        load_prompts(path, seed=0, heldout_share=0)


def test_what_is_not_there_or_not_read_is_an_error_with_the_way_out(tmp_path: Path) -> None:
    write(tmp_path / "train.txt", [ENVIRONMENT_LINE])
    write(tmp_path / "train.xls", [ENVIRONMENT_LINE])
    write(tmp_path / "empty.txt", [""])
    for spec, reason in {
        f"{tmp_path}/tran.txt": rf"no file {tmp_path}/tran.txt; did you mean {tmp_path}/train.txt",
        f"{tmp_path}/train.jsonl": rf"did you mean {tmp_path}/train.txt\?",  # and not train.xls
        f"{tmp_path}/nowhere/train.txt": "there is no folder",
        f"{tmp_path}/train.xls": r"\.txt, \.jsonl, .*\.epd, \.pgn, not from \.xls files",
        f"{tmp_path}": "is a folder: name one file",
        f"{tmp_path}/empty.txt": "no prompts to train on .*give other --prompts",
        "bundle": "no file bundle.*OWNER/NAME on the hub",
    }.items():
        with pytest.raises(ValueError, match=reason):
            load_prompts(spec, seed=0)
    with pytest.raises(ValueError, match="all of them are held out: lower --heldout-share"):
        load_prompts(f"{tmp_path}/train.txt", seed=0, heldout_share=1.0)


def test_the_bundle_brings_its_own_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "POSITIONS", tmp_path)
    with pytest.raises(ValueError, match=r"train.txt is missing"):
        load_prompts("bundled", seed=0)
    lines = game_lines(60, 60)
    fens = sorted({line[3:].split("M:")[0].split("+")[0].strip() for line in lines})
    train = [line for line in lines if any(fen in line.split("+")[0] for fen in fens[:40])]
    write(tmp_path / "train.txt", train)
    write(tmp_path / "heldout.txt", [line for line in lines if line not in train])
    source = load_prompts("bundled", seed=0, policy_share=0.5, heldout_count=15)
    assert Counter(p.task for p in source.heldout) == {"policy": 15, "environment": 15}
    assert all(p.id.startswith("heldout.txt:") for p in source.heldout)
    assert sorted(set(ids(source.draw(80)))) == sorted(f"train.txt:{n}" for n in range(1, 81))
    write(tmp_path / "heldout.txt", train[:1])
    with pytest.raises(AssertionError, match="overlap"):
        load_prompts("bundled", seed=0)


def test_the_real_bundle_is_whole() -> None:
    source = load_prompts("bundled", seed=0, policy_share=0.5, max_bad_share=0.0)
    assert Counter(p.task for p in source.heldout) == {"policy": 1000, "environment": 1000}
    assert Counter(p.task for p in source.draw(8)) == {"policy": 4, "environment": 4}
