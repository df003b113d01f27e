"""Reports: whole pages, several folders at once, what is broken or missing, the command."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import run
from report_folders import (
    FEN,
    completion,
    evaluation,
    size_row,
    sweep_settings,
    write_lines,
    write_run,
    write_sweep,
)

from grpo.evaluate import Evaluation, quality
from grpo.evaluate.quality import Example, Quality
from grpo.play.record import Game, Match
from grpo.types import Prompt
from grpo.workbench.report import make_page, write_report
from grpo.workbench.report.compare import lacking, verdict
from grpo.workbench.report.figures import Curve, draw, phase_color
from grpo.workbench.report.gallery import cards
from grpo.workbench.report.page import save_pictures, to_html, to_markdown
from grpo.workbench.report.read import Run, read_folder, read_run
from grpo.workbench.report.run import summary
from grpo.workbench.report.sections import Card, Page, Section, Table
from grpo.workbench.report.steps import memory_tables

REPORT = "scripts/report.py"


# --------------------------------------------------------------------------------------- whole pages


def titles(page: Page) -> list[str]:
    return [section.title for section in page.sections]


def section(page: Page, title: str) -> Section:
    return next(each for each in page.sections if each.title == title)


def test_the_page_of_a_sweep(tmp_path):
    page = make_page([write_sweep(tmp_path / "sweep", notes="- mine")])
    assert titles(page) == [
        "What it says", "Notes", "Results", "Learning curves", "Quality against batch size", "Time",
        "Worth it", "Memory", "What the sizes had in common",
    ]  # fmt: skip
    said = " ".join(section(page, "What it says").sentences)
    assert "size 64 is best: 2.300" in said and "Sizes 32 and 128 are within the noise" in said
    assert "Size 128 does not fit" in " ".join(section(page, "Time").sentences)
    assert "Compiling took 2 min 30 s" in " ".join(section(page, "Time").sentences)
    rows = {row[0]: row for row in section(page, "Results").tables[0].rows}
    # 256 updates of 0.02 + 64 · 0.004 s and 2 s of compiling
    assert rows["64"][1:6] == ("ok", "256", "3e-4", "13", "1 min 13 s")
    assert rows["64"][7:11] == ("2.250", "2.300 ± 0.012", "2.299 at 2.0 M", "0.050")
    assert rows["512"][1] == "out of memory" and set(rows["512"][4:]) == {"–"}
    budget = {row[0]: row[1:] for row in section(page, "Memory").tables[0].rows}
    assert budget["activations"] == ("1.75 GB", "3.50 GB") and budget["predicted"][1] == "4.80 GB"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def of_run(run_folder) -> Page:
    return make_page([run_folder])


def test_the_page_of_a_run(of_run):
    page = of_run
    assert titles(page) == [
        "What it says", "Held-out quality", "Reward", "Policy", "What it wrote", "Time", "Memory", "Settings",
    ]  # fmt: skip
    said = " ".join(section(page, "What it says").sentences)
    assert "training reward went from 0.515 (first 2 steps) to 0.695 (last 2 steps)" in said
    assert "held-out reward went from 0.600 to 0.700 at step 20. Its 95 % interval over prompts, " in said
    assert "does not hold the first value" in said and "In 25 % of the groups" in said
    table = section(page, "Held-out quality").tables[0]
    assert table.rows[0] == ("reward", "0.600 (0.560 to 0.640)", "0.700 (0.660 to 0.740)")
    assert (
        "4.0 s in the median, and all of them 1 min 20 s: 50 % learn, 25 % sample"
        in (section(page, "Time").sentences[0])
    )
    assert "learn at step 3" in section(page, "Memory").sentences[0]


def test_memory_by_phase_is_the_highest_peak_beside_its_prediction(run_folder):
    rows = {row[0]: row for row in memory_tables(read_folder(run_folder))[0].rows}
    assert rows["learn"] == ("learn", "32", "1.00 GB", "1.25 GB", "-20.0 %", "1")
    assert rows["sample"] == ("sample", "32", "1.00 GB", "0.80 GB", "+25.0 %", "0")


def test_an_interval_that_holds_the_first_value_shows_no_change(run_folder):
    short = replace(read_folder(run_folder), evaluations=[evaluation(0), evaluation(4)])  # 0.62 ± 0.04
    assert "holds the first value" in " ".join(summary(short))


def test_pages_hold_what_files_say_as_text(tmp_path):
    """A completion is a model's output, and notes may hold anything."""
    evil = "</pre><script>alert(1)</script>\n````\n<img src=x onerror=alert(1)>"
    folder = write_run(tmp_path / "run")
    write_lines(
        folder / "completions.jsonl", [completion(1, evil), completion(1, evil, prompt=f"Say {evil}")]
    )
    html, markdown = write_report([folder])
    assert "<script" not in html.read_text() and "<img" not in html.read_text()
    assert "&lt;script&gt;" in html.read_text()
    fenced = markdown.read_text().split("`````")  # one more than the text has
    assert "<script>" in fenced[1] and all("<script" not in part for part in fenced[::2])
    page = make_page([write_sweep(tmp_path / "sweep", notes=f"# Title\n{evil}\n![x](http://x/y.png)")])
    assert (
        "<script" not in to_html(page) and "<img" not in to_html(page) and "<h3>Title</h3>" in to_html(page)
    )
    assert "<script" not in to_markdown(page, "files")


def test_a_page_needs_nothing_else(of_run, tmp_path):
    text = to_html(of_run)
    assert "default-src 'none'" in text
    assert not re.findall(r'(?:src|href)="(?!#|data:)', text) and "@import" not in text
    assert not re.findall(r"url\((?!#)", text)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    assert all(target in ids for target in re.findall(r'href="#([^"]+)"', text))
    save_pictures(of_run, tmp_path / "files")
    pictures = re.findall(r"!\[.*\]\((.*)\)", to_markdown(of_run, "files"))
    assert pictures and all((tmp_path / each).read_text().startswith("<svg") for each in pictures)


def test_markdown_tables_keep_their_columns():
    page = Page("t", "l", [Section("s", tables=[Table(("a|b", "n"), [("x\ny|", "1.5 GB"), ("z", "–")])])])
    assert "| a\\|b | n |\n|---|---:|\n| x y\\| | 1.5 GB |" in to_markdown(page, "files")


# --------------------------------------------------------------------------------------- several at once


def test_runs_with_different_metrics_are_compared_as_far_as_it_goes(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", learning_rate=2e-5)
    lines = [json.loads(line) for line in (b / "metrics.jsonl").read_text().splitlines()]
    write_lines(
        b / "metrics.jsonl", [{k: v for k, v in line.items() if k != "kl"} | {"new": 1} for line in lines]
    )
    (b / "completions.jsonl").unlink()
    page = make_page([a, b])
    missing = section(page, "What is missing").sentences
    assert missing == [
        "a has no new.",
        "b has no kl.",
        "b: completions.jsonl is missing: no completions are shown.",
    ]
    rows = {row[0]: row[1:] for row in section(page, "How they ended").tables[0].rows}
    assert rows["training kl"] == ("0.039", "–") and rows["training reward"] == ("0.695", "0.695")
    assert ("--learning-rate", "1e-05", "2e-05") in section(page, "Where their settings differ").tables[
        0
    ].rows
    assert "The same prompts" not in titles(page)


def test_runs_have_their_completions_of_the_same_prompts_side_by_side(tmp_path):
    page = make_page([write_run(tmp_path / "a"), write_run(tmp_path / "b")])
    cards: list[Card] = list(section(page, "The same prompts").cards)
    assert [card.title.split(",")[0] for card in cards] == ["a", "b", "a", "b"]
    assert cards[0].prompt == cards[1].prompt != cards[2].prompt
    assert to_html(page).count('class="board"') == 6  # one of a policy prompt, two of an environment prompt


def run_with(name: str, reward: float, low: float | None, high: float | None) -> Run:
    line = {"step": 9, "eval_reward": reward, "eval_reward/low": low, "eval_reward/high": high}
    return Run(name, {}, [{"step": 1, "reward": 0.5}], [line], [], [], {}, [])


def test_who_ended_higher_and_whether_intervals_say_so():
    best = run_with("best", 0.8, 0.7, 0.9)
    said = verdict([run_with("near", 0.7, 0.6, 0.75), best, run_with("far", 0.5, 0.4, 0.69)])
    assert said[0] == "best ended with the highest held-out reward, 0.800 (0.700 to 0.900)."
    assert said[1] == "near ended 0.100 lower; their intervals overlap: it may be chance."
    assert said[2] == "far ended 0.300 lower; their intervals do not overlap."
    assert "no intervals" in verdict([best, run_with("old", 0.5, None, None)])[1]
    assert "Fewer than two" in verdict([best, replace(best, evaluations=[])])[0]
    assert lacking([best, best]) == []
    without = {"step": 9, "eval_reward": 0.5}
    assert lacking([best, replace(best, name="old", evaluations=[without])]) == ["old has no intervals."]


def test_sweeps_are_compared(tmp_path):
    page = make_page([write_sweep(tmp_path / "a"), write_sweep(tmp_path / "b")])
    rows = {row[0]: row[1:] for row in section(page, "What it says").tables[0].rows}
    assert rows["best by quality"] == ("64, 2.300 nats a token, 1 min 13 s",) * 2
    assert [figure.name for figure in section(page, "Curves").figures] == ["quality", "throughput", "seconds"]


def test_folders_of_one_name_are_told_apart(tmp_path):
    page = make_page([write_run(tmp_path / "x" / "run"), write_run(tmp_path / "y" / "run")])
    assert page.title == "Runs compared: x/run and y/run"


# ------------------------------------------------------------------------------ what is broken or missing


def test_a_sweep_that_was_cut_short_is_reported_as_far_as_it_goes(tmp_path):
    folder = write_sweep(tmp_path / "sweep")
    row = (folder / "size-00032.json").read_text()
    (folder / "size-00032.json").write_text(row[: len(row) // 2])
    lines = (folder / "size-00064.jsonl").read_text()
    (folder / "size-00064.jsonl").write_text(lines[:-30])
    (folder / "size-00128.json").unlink()
    (folder / "size-00256.json").unlink()
    (folder / "size-00256.jsonl").unlink()
    (folder / "size-00016.json").write_text(
        json.dumps(size_row(16) | {"final_heldout": None, "seconds": "x"})
    )
    page = make_page([folder])
    assert list(section(page, "What is missing").sentences) == [
        "size-00016.json has no seconds.",
        "size-00016.json has no final_heldout.",
        "size-00032.json cannot be read, as if it had been cut short: the figures of size 32 are missing.",
        "size-00064.jsonl has a line that cannot be read; the others are shown.",
        "Size 128 has no figures: it is unfinished.",
        "Size 256 has no figures: it is not run.",
    ]
    status = [row[1] for row in section(page, "Results").tables[0].rows]
    assert status == ["ok", "unreadable", "ok", "unfinished", "not run", "out of memory"]
    assert to_html(page) and to_markdown(page, "files")


def test_a_sweep_without_its_settings_or_any_figure_is_still_reported(tmp_path):
    folder = write_sweep(tmp_path / "sweep")
    (folder / "sweep.json").write_text('{"version": 1, "objec')
    for each in folder.glob("size-*.json"):
        each.write_text("{}")
    page = make_page([folder])
    assert "No size finished" in section(page, "What it says").sentences[0]
    assert "sweep.json cannot be read" in section(page, "What is missing").sentences[0]


def test_a_run_that_lacks_files_says_so(tmp_path):
    folder = write_run(tmp_path / "run")
    for name in ("config.yaml", "completions.jsonl", "memory.jsonl"):
        (folder / name).unlink()
    page = make_page([folder])
    said = section(page, "What is missing").sentences
    assert said[0].startswith("The settings are not known: config file") and "does not exist" in said[0]
    assert said[1:] == [
        "completions.jsonl is missing: no completions are shown.",
        "memory.jsonl is missing: memory by phase is not shown.",
    ]
    assert not {"What it wrote", "Memory", "Settings"} & set(titles(page)) and to_html(page)


def test_a_run_of_its_first_lines(tmp_path):
    """As one that was killed while it wrote the second, and was never evaluated."""
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5, "kl": null}\n{"step": 2, "rew')
    page = make_page([folder])
    said = section(page, "What is missing").sentences
    assert said[0] == "metrics.jsonl has a line that cannot be read; the others are shown."
    assert (
        said[1] == "The run logged no KL and no times and no lengths and no learning rate and no evaluations."
    )
    assert to_html(page).count("curve-0") == 1 + 1  # the reward, and memory


def empty(folder: Path) -> list[Path]:
    folder.mkdir()
    return [folder]


def empty_sweep(folder: Path) -> list[Path]:
    folder.mkdir()
    (folder / "sweep.json").write_text(json.dumps(sweep_settings()))
    return [folder]


def empty_run(folder: Path) -> list[Path]:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("")
    return [folder]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda folder: [folder], "is no folder: give that of a run", id="missing"),
        pytest.param(lambda folder: [], "no folder is given: give", id="none"),
        pytest.param(empty, "neither a run nor a sweep.*Give the folder that", id="empty"),
        pytest.param(empty_sweep, "no size has been tried: run the sweep", id="empty sweep"),
        pytest.param(empty_run, "logged no step yet: wait", id="empty run"),
        pytest.param(lambda f: [write_run(f / "a"), write_sweep(f / "b")], "of one kind", id="both"),
        pytest.param(lambda f: [write_run(f / "a"), f / "a" / ".." / "a"], "given twice: give", id="twice"),
    ],
)
def test_what_cannot_be_reported_on_is_an_error_with_its_remedy(tmp_path, make, words):
    with pytest.raises(ValueError, match=words):
        write_report(make(tmp_path / "folder"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written to .*out.*: give another --output"):
        write_report([write_run(tmp_path / "run")], tmp_path / "out")


# --------------------------------------------------------------------------------------------- figures


def test_a_curve_of_one_point_is_seen_and_one_of_none_is_not():
    assert draw("x", "X", [Curve("a", [], [])], x="step", y="y") == []
    (figure,) = draw("x", "X", [Curve("a", [1.0], [2.0])], x="step", y="y")
    assert "<use" in figure.svg and 'id="x-curve-0"' in figure.svg


def test_evaluations_have_the_ends_of_their_intervals():
    """8 of 10, with Wilson's interval as statistics software gives it."""
    scores = {"policy/legal": np.array([1.0] * 8 + [0.0] * 2)[:, np.newaxis]}
    result = Evaluation.of([Prompt(str(row), "P:", {}) for row in range(10)], scores)
    assert result.interval_metrics() == {
        "eval_policy/legal/low": pytest.approx(0.4902, abs=1e-4),
        "eval_policy/legal/high": pytest.approx(0.9433, abs=1e-4),
    }


# --------------------------------------------------------------------------------------------- command


def test_the_command_writes_both_forms_into_the_folder_and_says_where(tmp_path):
    write_sweep(tmp_path / "sweep")
    done = run(REPORT, "sweep", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["sweep/report.html", "sweep/report.md"]
    assert (tmp_path / "sweep/report.html").read_text().startswith("<!DOCTYPE html>")
    assert len(list((tmp_path / "sweep/report-files").glob("*.svg"))) == 8


def test_several_runs_go_into_a_folder_of_their_own(tmp_path, monkeypatch):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    assert write_report([Path("a"), Path("b")]) == [Path("report/report.html"), Path("report/report.md")]
    assert "Runs compared: a and b" in (tmp_path / "report/report.md").read_text()


def test_a_wrong_folder_is_exit_status_2_without_a_traceback(tmp_path):
    done = run(REPORT, "nowhere", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "error nowhere is no folder" in " ".join(done.stderr.split())


def test_what_was_measured_before_and_after_is_a_section(tmp_path):
    before = Evaluation({"policy/legal": np.array([0.0, 1.0] * 50)}, {"policy/legal": "same"})
    after = Evaluation({"policy/legal": np.ones(100)}, {"policy/legal": "same"})
    folder = write_run(tmp_path / "run")
    quality.save(folder, Quality(before, before), Quality(after, before), [
        Example(f"P: {FEN}", " M: a6a8 E: 0.0 B: a6a8", " M: a6a8 E: 0.0 B: a1a1")
    ])  # fmt: skip
    (section,) = (each for each in make_page([folder]).sections if each.title == "Before and after")
    assert [table.columns[0] for table in section.tables] == ["sampled", "greedy"]
    assert section.tables[0].rows[0][:4] == ("a legal move", "50.0", "100.0", "+50.0")
    assert [card.title for card in section.cards] == ["position 1, before", "position 1, after"]
    assert "illegal" in section.cards[1].remark and section.cards[0].boards
    (folder / quality.FOLDER / "examples.json").write_text("{")
    page = make_page([folder])
    assert "Before and after" not in titles(page)
    assert any("Before and after training is not shown" in line for line in page.sections[-1].sentences)


def test_a_run_without_steps_does_not_stand_in_the_way_of_others(tmp_path, logged):
    runs = [write_run(tmp_path / name) for name in ("one", "two")]
    (waiting,) = empty_run(tmp_path / "three")
    page = make_page([runs[0], waiting, runs[1]])
    assert page.title == "Runs compared: one and two"
    assert any("left out" in line and "three" in line for line in logged)


def test_a_conversation_is_shown_as_it_was_said(tmp_path):
    run = write_run(tmp_path / "talk")
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    record = {"step": 1, "prompt": "<|start|>", "messages": asked, "completion": "4", "rewards": {"f": 1.0}}
    (run / "completions.jsonl").write_text(json.dumps(record) + "\n")
    (card,) = cards(read_run(run))
    assert card.prompt == "system: Be brief.\nuser: 2 + 2?" and card.completion == "4"


def test_a_series_has_one_colour_in_all_pictures(tmp_path):
    phases = ("sample", "reward", "score", "learn", "update", "wait", "reduce", "other")
    assert len({phase_color(phase) for phase in phases}) == len(phases)


# ------------------------------------------------------------------------------------------------- games


def matches_in(folder: Path, results: Sequence[str], name: str = "a-match") -> Match:
    """Played by this run as White and Black in turn, three half-moves each."""
    games = [
        Game(
            FEN,
            number % 2 == 0,
            ["a6a5", "h5h4", "d4e4"],
            {2: "candidate"},
            result,
            "stalemate" * bool(result),
        )
        for number, result in enumerate(results)
    ]
    match = Match(("run step-000009", "rook-tiny"), {"temperature": 1.0, "illegal_moves": "resign"}, games)
    (folder / "matches" / name).mkdir(parents=True)
    match.save(folder / "matches" / name)
    return match


def test_matches_stand_with_their_score_and_three_games_as_boards(tmp_path):
    folder = write_run(tmp_path / "run")
    # White, Black, White, …: won, drawn, lost, lost, drawn.
    match = matches_in(folder, ("1-0", "1/2-1/2", "0-1", "1-0", "1/2-1/2", "*"))
    assert tuple(match.score) == (1, 2, 2)
    page = make_page([folder])
    (section,) = (each for each in page.sections if each.title == "Games")
    assert section.sentences == [
        "run step-000009 scored 40.0 % against rook-tiny in 5 games (temperature 1, illegal answers lose): "
        "too close to tell."
    ]
    (row,) = section.tables[0].rows
    assert row[2:6] == ("5", "1", "2", "2") and row[6].startswith("40.0 % (") and row[8:] == ("0.60", "3")
    assert [card.title[:6] for card in section.cards] == ["game 1", "game 2", "game 3"]
    first = section.cards[0]
    assert len(first.boards) == 2 and first.prompt == FEN and first.completion == "56. Ra5 h4 57. Ke4"
    assert first.remark == "Illegal answers at half-move 3." and section.cards[1].remark == ""
    html, markdown = to_html(page), to_markdown(page, "report-files")
    assert html.count("<svg") > 6 and "game 3: run step-000009 against rook-tiny, 0-1" in html
    assert "56. Ra5 h4 57. Ke4" in markdown and "| rook-tiny |" in markdown


def test_a_match_that_cannot_be_read_is_told_of_and_one_without_a_game_is_not(tmp_path):
    folder = write_run(tmp_path / "run")
    matches_in(folder, ("*",), "begun")
    matches_in(folder, ("1-0",), "broken")
    (folder / "matches" / "broken" / "match.json").write_text("{")
    page = make_page([folder])
    assert "Games" not in titles(page)
    assert any("A match is not shown" in line for line in page.sections[-1].sentences)
