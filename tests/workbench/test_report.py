"""Reports: pages of a sweep, a run and several, what is broken or missing, and what figures say."""

import json
import re
from dataclasses import replace
from pathlib import Path

import chess
import numpy as np
import pytest
import report_folders
from commands import here
from report_folders import FEN, GB, NEXT_FEN, completion, write_json, write_lines, write_run, write_sweep

from grpo.evaluate import Evaluation, quality
from grpo.evaluate.quality import Example
from grpo.play.record import Match
from grpo.play.thought import Thought
from grpo.workbench import report
from grpo.workbench.report import make_page, to_html
from grpo.workbench.report.boards import BAD, GOOD, WRONG_SQUARE, answer_card, cards, chosen
from grpo.workbench.report.charts import PHASE_COLORS, Curve, curve, line
from grpo.workbench.report.page import Page, Section
from grpo.workbench.report.read import Sweep, read_folder
from grpo.workbench.report.sweep import behind, best_by_quality, fastest, not_told_from, sweep_page
from grpo.workbench.report.sweep import facts as sweep_facts
from grpo.workbench.report.wording import duration, number, setting
from grpo.workbench.sizes import Size

EVIL = "</pre><script>alert(1)</script>\n````\n<img src=x onerror=alert(1)>"
"""A completion is a model's output, and notes may hold anything."""


def titles(page: Page) -> list[str]:
    return [section.title for section in page.sections]


def section(page: Page, title: str) -> Section:
    return next(each for each in page.sections if each.title == title)


def facts(page: Page, title: str = "What it says") -> dict[str, tuple[str, ...]]:
    """Value, interval and note by what they are of."""
    return {fact.what: fact[1:] for fact in section(page, title).facts}


def missing(page: Page) -> list[str]:
    assert to_html(page)
    return section(page, "What is missing").sentences


def rows(page: Page, title: str) -> dict[str, dict[str, str]]:
    """Of a section's first table, by their first cell."""
    return {next(iter(row.values())): row for row in section(page, title).tables[0].rows}


def cells(page: Page, title: str, row: str) -> list[str]:
    """Of one row, without the first."""
    return list(rows(page, title)[row].values())[1:]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Page:
    folder = tmp_path_factory.mktemp("sweeps")
    return make_page([write_sweep(folder / "sweep", notes=f"# Title\n{EVIL}\n![x](http://x/y.png)")])


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """A run that was measured before and after, and played a match: won, drawn, lost, lost, drawn, begun."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "run")
    evil = [completion(20, EVIL), completion(20, EVIL, prompt=f"Say {EVIL}")]
    with (folder / "completions.jsonl").open("a") as file:
        file.write("".join(json.dumps(record) + "\n" for record in evil))
    before, after = (
        Evaluation({"policy/legal": np.array(scores)}, {"policy/legal": "same"})
        for scores in ([0.0, 1.0] * 50, [1.0] * 100)
    )
    shown = Example(f"P: {FEN}", " M: a6a8 E: 0.0 B: a6a8", " M: a6a8 E: 0.0 B: a1a1")
    quality.save(folder, *(dict.fromkeys(quality.MODES, score) for score in (before, after)), [shown])
    results = ("1-0", "1/2-1/2", "0-1", "1-0", "1/2-1/2", "*")  # as White and Black in turn
    settings = {"temperature": 1.0, "illegal_moves": "resign"}
    match = Match.begin(("run step-000009", "rook-tiny"), settings, [chess.Board(FEN)] * 3, 6)
    for game, result in zip(match.games, results, strict=True):
        for move, how in (("a6a5", "best"), ("h5h4", "best"), ("d4e4", "candidate")):
            game.play(Thought(chess.Move.from_uci(move), how))
        game.pgn.headers.update({"Result": result, "Termination": "stalemate"})
    (folder / "matches" / "a-match").mkdir(parents=True)
    match.save(folder / "matches" / "a-match")
    write_json(folder / "leak.json", {"leak": False})
    return folder


@pytest.fixture(scope="module")
def of_run(run_folder) -> Page:
    return make_page([run_folder])


def test_the_page_of_a_sweep(sweep):
    """256 updates of 0.02 + 64 · 0.004 s, 2 s of compiling. Of a difference: 0.05 · t(19) / √19 = 0.024."""
    assert titles(sweep) == [
        "What it says", "Notes", "Results", "Learning curves", "Memory", "What the sizes had in common",
    ]  # fmt: skip
    said = facts(sweep)
    assert said["Best held-out loss"][:2] == ("size 64", "2.300 ± 0.019 nats a token")
    assert said["Not told from the best"][0] == "size 32, 128"
    assert said["Trade-off"][:2] == ("size 64", "1 min 13 s")
    assert said["Fastest"][:2] == ("size 256", "1 min 9 s") and "cannot tell: size 64." in said["Fastest"][2]
    assert said["Size 512"] == (
        "out of memory", "4.72 GB predicted", "DefaultCPUAllocator: can't allocate memory",
    )  # fmt: skip
    assert said["Learning rate"][:2] == ("the same at every size", "0.0003")
    results = rows(sweep, "Results")
    assert results["64"] == {
        "size": "64", "status": "ok", "held-out": "2.300 ± 0.019", "behind the best": "0.000",
        "time": "1 min 13 s", "tokens a second": "29,681", "memory": "0.81 GB",
        "tensors, predicted": "0.59 GB", "measured": "0.56 GB", "training": "2.253", "gap": "0.047",
        "best held-out": "2.300 at 100%",
        "updates": "256", "learning rate": "0.0003", "warm-up": "13", "start": "2.0 s",
    }  # fmt: skip
    assert results["32"]["behind the best"] == "0.012 (-0.012 to 0.036)"
    assert results["128"]["start"] == "2 min 30 s"
    lost = results["512"]
    assert (lost["status"], lost["tensors, predicted"]) == ("out of memory", "4.72 GB")
    assert (lost["measured"], lost["behind the best"]) == ("–", "–")
    assert cells(sweep, "What the sizes had in common", "quality: unit") == ["nats a token"]
    shown = [picture.title for each in sweep.sections for picture in each.pictures]
    assert shown == [
        "Held-out loss by batch size", "Quality against time", "Throughput", "Held-out loss over tokens",
        "Training loss over tokens", "Held-out loss over seconds of training", "Tensors by batch size",
        "Memory by batch size",
    ]  # fmt: skip


def test_the_page_of_a_run(of_run, run_folder):
    assert titles(of_run) == [
        "What it says", "Before and after", "Games", "Held-out quality", "Reward", "Policy", "What it wrote",
        "Time", "Memory", "Settings",
    ]  # fmt: skip
    said = facts(of_run)
    assert said["Training reward"][::2] == ("0.515 → 0.695", "Means of the first and the last 2 of 20 steps.")
    assert said["Held-out reward"][:2] == ("0.600 → 0.700", "0.660 to 0.740")
    assert said["Held-out reward"][2] == "At step 0 and at step 20; the 95 % interval is the last one's."
    assert said["KL to the reference"][0] == "0.04 nats a token"
    assert said["Groups of equal rewards"] == ("25%", "", "They teach nothing but the KL.")
    shares = "learn 50%, sample 25%, score 12%, other 12%"
    assert said["Time of a step"] == ("4.0 s", "1 min 20 s in all", shares)
    fewer = "And went on with fewer rows: learn at step 3."
    assert said["Phases that ran out of memory"][::2] == ("1", fewer)
    assert said["Leak test"][0] == "no leak" and "Updates left out" not in said
    early = report.run_page(replace(read_folder(run_folder), settings={}))
    assert facts(early)["Groups of equal rewards"][2] == "They teach nothing."
    ends = cells(of_run, "Held-out quality", "reward")
    assert ends == ["0.600 (0.560 to 0.640)", "0.700 (0.660 to 0.740)"]
    of_step_2 = ["32", "1.00 GB", "1.25 GB", "-20.0 %", "2.00 GB", "1"]
    assert cells(of_run, "Memory", "learn") == of_step_2
    assert cells(of_run, "Memory", "sample") == ["32", "1.00 GB", "0.80 GB", "+25.0 %", "2.00 GB", "0"]
    assert len(set(PHASE_COLORS.values())) == 9


def test_what_a_run_of_language_modelling_wrote_is_shown_as_well(tmp_path):
    page = make_page([write_sweep(tmp_path / "sweep") / "size-00064"])
    assert facts(page)["Held-out loss"][0] == "5.500 → 2.300" and "Training loss" in facts(page)
    assert [picture.title for picture in section(page, "Reward").pictures] == ["Loss"]


def test_a_run_was_measured_before_and_after_and_played(of_run):
    found = section(of_run, "Before and after")
    assert [next(iter(table.rows[0])) for table in found.tables] == ["sampled", "greedy"]
    assert list(found.tables[0].rows[0].values())[:4] == ["a legal move", "50.0", "100.0", "+50.0"]
    assert [card.title for card in found.cards] == ["position 1, before", "position 1, after"]
    assert "illegal" in found.cards[1].remark and found.cards[0].boards
    row = cells(of_run, "Games", "rook-tiny")
    assert row[:3] == ["1.0", "–", "resign"] and row[3:7] == ["5", "1", "2", "2"]
    assert row[7].startswith("40.0 % (") and row[9:] == ["0.60", "3"]
    (last,) = section(of_run, "Games").cards
    assert last.title == "The last game: run step-000009 against rook-tiny, 1/2-1/2"
    assert len(last.boards) == 1 and last.prompt == FEN and last.completion == "56. Ra5 h4 57. Ke4"


def test_pages_hold_what_files_say_as_text(of_run, sweep):
    html = to_html(of_run)
    assert "<script" not in html and "<img" not in html and "&lt;script&gt;" in html
    html = to_html(sweep)
    assert "<script" not in html and "<img" not in html and "<h1>Title</h1>" in html


def test_a_page_needs_nothing_else(of_run, sweep):
    for page in (of_run, sweep):
        text = to_html(page)
        assert "default-src 'none'" in text and "@import" not in text
        links = re.sub(r'<div class="notes">.*?</div>', "", text, flags=re.DOTALL)
        assert not re.findall(r'(?:src|href)="(?!#|data:)|url\((?!#)', links)
        ids = re.findall(r'\bid="([^"]+)"', text)
        assert len(ids) == len(set(ids)) and set(re.findall(r'href="#([^"]+)"', text)) <= set(ids)


def test_the_command_writes_where_the_page_belongs(sweep, tmp_path, monkeypatch):
    """Into the one folder, or for several into one of their own."""
    monkeypatch.setattr(report, "make_page", lambda folders: sweep)
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / name).mkdir()
    for folders, target in ((["a"], "a"), (["a", "b"], "report")):
        assert here("report", *folders).stdout.split() == [f"{target}/report.html"]
        assert (tmp_path / target / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_runs_with_different_metrics_are_compared_as_far_as_it_goes(tmp_path, logged):
    """What one of them lacks is a dash; a run without a step is left out."""
    a, b = write_run(tmp_path / "x" / "run"), write_run(tmp_path / "y" / "run", learning_rate=2e-5)
    (waiting := tmp_path / "waiting").mkdir()
    (waiting / "metrics.jsonl").write_text("")
    lines = [json.loads(line) for line in (b / "metrics.jsonl").read_text().splitlines()]
    lost = {name for line in lines for name in line if name == "kl" or name.endswith(("/low", "/high"))}
    write_lines(b / "metrics.jsonl", [{n: line[n] for n in line.keys() - lost} for line in lines])
    (b / "memory.jsonl").unlink()
    page = make_page([a, waiting, b])
    assert page.title == "Runs compared: x/run, y/run"  # of one name, and told apart
    assert any("left out" in line and "waiting" in line for line in logged)
    assert missing(page) == ["y/run: memory.jsonl is missing: memory by phase is not shown."]
    ends = {
        "KL to the reference": ["0.04 nats a token", "–"], "Training reward": ["0.515 → 0.695"] * 2,
        "Held-out reward": ["0.600 → 0.700"] * 2, "Time of a step": ["4.0 s"] * 2,
    }  # fmt: skip
    assert {what: cells(page, "How they ended", what) for what in ends} == ends
    assert cells(page, "Held-out quality", "reward") == ["0.700 (0.660 to 0.740)", "0.700"]
    assert list(rows(page, "Where their settings differ")) == ["--learning-rate"]
    assert cells(page, "Where their settings differ", "--learning-rate") == ["1e-05", "2e-05"]
    assert to_html(page).count("-curve-") == 2


def test_sweeps_stand_side_by_side_and_one_that_was_cut_short_is_reported_as_far_as_it_goes(tmp_path):
    folder, other = write_sweep(tmp_path / "sweep"), write_sweep(tmp_path / "b")
    page = make_page([folder, other])
    assert titles(page) == ["Quality", "Results of sweep", "Results of b"]
    assert to_html(page).count("-curve-") == 2
    assert facts(page, "Results of b")["Best held-out loss"][0] == "size 64"
    assert len(rows(page, "Results of b")) == 6
    header = report_folders.sweep_settings()
    write_json(other / "sweep.json", header | {"quality": {"name": "held-out reward", "better": "higher"}})
    assert "Not comparable" in section(make_page([folder, other]), "Quality").sentences[0]

    metrics = folder / "size-00064" / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-40])
    for name in ("size-00032/ended.json", "size-00016/heldout.json"):
        (folder / name).unlink()
    write_lines(folder / "size-00128" / "metrics.jsonl", [{"step": 1, "loss": None, "step_time": "x"}])
    for file in (folder / "size-00256").iterdir():
        file.unlink()
    (folder / "size-00256").rmdir()
    page = make_page([folder])
    assert missing(page) == [
        "size-00064/metrics.jsonl has lines that cannot be read, 1 of them; the others are shown.",
    ]  # fmt: skip
    results = rows(page, "Results")
    status = [row["status"] for row in results.values()]
    assert status == ["ok", "unfinished", "ok", "ok", "not run", "out of memory"]
    assert results["128"]["held-out"] == "–" and facts(page)["Size 256"][0] == "not run"
    assert results["16"]["behind the best"] == "0.098"  # what cannot be paired has no interval
    assert "Not told from the best" not in facts(page)
    (folder / "sweep.json").write_text('{"objec')
    for each in folder.glob("size-*/ended.json"):
        each.write_text("{}")
    page = make_page([folder])
    assert facts(page)["Best held-out loss"][0] == "not known"
    assert "sweep.json cannot be read" in missing(page)[0]


def test_a_run_that_lacks_files_or_holds_broken_ones_says_so(tmp_path):
    """Or has but its first lines, as one that was killed while it wrote the second."""
    folder = write_run(tmp_path / "run")
    for name in ("config.yaml", "completions.jsonl", "memory.jsonl"):
        (folder / name).unlink()
    for name, content in (("matches/broken/games.pgn", "{"), ("before-after/examples.json", "{")):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(content)
    page = make_page([folder])
    lacks = missing(page)
    for words in (
        "settings are not known", "completions.jsonl is missing", "memory.jsonl is missing",
        "Before and after training is not shown", "A match is not shown",
    ):  # fmt: skip
        assert sum(words in sentence for sentence in lacks) == 1, words
    absent = {"What it wrote", "Memory", "Settings", "Games", "Before and after"}
    assert len(lacks) == 5 and not absent & set(titles(page))

    folder = write_run(tmp_path / "begun")
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5, "kl": null}\n{"step": 2, "rew')
    page = make_page([folder])
    (broken,) = missing(page)
    assert broken.startswith("metrics.jsonl has lines that cannot be read, 1 of them")
    assert to_html(page).count("curve-0") == 1 + 2  # the reward, and memory


ASKED = f"A: {FEN}+a4a5+a4a5+"


@pytest.mark.parametrize(
    ("prompt", "text", "boards", "arrow", "words"),
    [
        (f"P: {FEN}", "M: a4a5 E: 0.3 B: a4a5", 1, GOOD, "White to move: a5"),
        (f"P: {FEN}", "M: d4g8 E: 0.3 B: d4g8", 1, BAD, "d4g8, which is illegal"),
        (f"P: {FEN}  ", "B: resign", 1, None, "no move can be read"),
        (ASKED, f"{NEXT_FEN}+0.001+0+0", 2, GOOD, "predicted: right"),
        (ASKED, f"{FEN}+0.001+0+0", 2, GOOD, "wrong on a4, a5"),
        (ASKED, NEXT_FEN.replace("b -", "w -"), 2, GOOD, "the pieces right, not whose turn"),
        (f"A: {FEN}+a4b7+a4b7+", f"{FEN}+-1.0+0+1", 2, BAD, "White plays a4b7, which is illegal"),
        (ASKED, "8/8", 1, GOOD, "no position: '8/8'"),
        ("Say hello", "hello", 0, None, ""),
        ("P: no position", "B: a4a5", 0, None, ""),
    ],
)
def test_boards(prompt, text, boards, arrow, words):
    card = answer_card("a title", "x", prompt, text)
    assert len(card.boards) == boards
    arrows = re.findall(r'<line[^>]*stroke="(#\w+)"', " ".join(board.svg for board in card.boards))
    assert set(arrows) == ({arrow} if arrow else set())
    assert words in " ".join([*(board.caption for board in card.boards), card.remark])
    if words in ("predicted: right", "wrong on a4, a5"):  # the pawn is still on a4 and not on a5
        assert card.boards[1].svg.count(WRONG_SQUARE) == 2 * ("wrong" in words)


def test_the_gallery_holds_the_best_and_the_worst_of_each_task_as_the_run_weighed_them(tmp_path):
    asked = {"policy": f"P: {FEN}", "answer": ASKED}
    records = [
        completion(9, f"{what} {n}", prompt=f"{prompt}{n}", reward=n / 100)
        for what, prompt in asked.items() for n in range(20)
    ]  # fmt: skip
    ends = [f"{what} {n}" for what in asked for n in (19, 18, 17, 2, 1, 0)]
    again = [*records, *records[:3]]  # the same text again
    assert [each["completion"] for each in chosen(again, {})] == ends
    alike = [completion(9, str(n), reward=n / 10) for n in range(5)] + records[:1]
    assert [each["completion"] for each in chosen(alike, {})] == ["4", "policy 0", "3", "2", "1", "0"]

    weighed = {"reward": ["my.py:brevity", "my.py:letter"], "reward_weights": [1.0, 2.0]}
    folder = write_run(tmp_path / "talk", **weighed)
    one = {"step": 1, "prompt": "a", "completion": "x", "rewards": {"brevity": 1.0, "letter": 0.0}}
    other = {"step": 1, "prompt": "b", "completion": "y", "rewards": {"brevity": 0.0, "letter": 0.9}}
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    talk = {
        "step": 1, "prompt": "<|start|>", "messages": said, "completion": "4", "rewards": {"brevity": 0.5},
        "terminated": False, "num_tokens": 9,
    }  # fmt: skip
    write_lines(folder / "completions.jsonl", [one, other, talk])
    run = read_folder(folder)
    assert [card.completion for card in cards(run)] == ["y", "x", "4"]
    assert [card.completion for card in cards(replace(run, settings={}))] == ["x", "y", "4"]
    assert cards(run)[2].prompt == "system: Be brief.\nuser: 2 + 2?"
    assert cards(run)[2].remark == "Cut off after 9 tokens."


def test_numbers_times_and_settings():
    numbers = {31387.4: "31,387", 0.5: "0.5", 2.34567: "2.346", 1.25e-5: "1.25e-05", 0: "0", -0.25: "-0.25"}
    assert {value: number(value) for value in numbers} == numbers
    times = {0.0123: "0.012 s", 4.25: "4.2 s", 59.96: "1 min 0 s", 124: "2 min 4 s", 3900: "1 h 5 min"}
    assert {value: duration(value) for value in times} == times
    given = {"a": [1, "x"], "b": [], "c": None, "d": True, "e_bytes": 3 * GB, "f": 2e6, "g": float("inf")}
    shown = ["1 x", "none", "none", "on", "3.00 GB", "2,000,000", "inf"]
    assert [setting(*each) for each in given.items()] == shown


def test_a_single_point_is_seen_and_nothing_is_drawn_of_none():
    picture = line("X", {"a": Curve([1.0], [2.0])}, x="step", y="y")
    assert "<use" in picture.svg and 'id="x-curve-0"' in picture.svg
    assert line("X", {"a": Curve([], [])}, x="step", y="y") is None


def test_a_curve_has_bars_where_all_its_points_have_the_ends_of_their_intervals():
    records = [{"step": 1, "m": 2.0, "m/low": 1.0, "m/high": 3.0}, {"step": 2, "n": 5.0}]
    whole, partly = (curve([*records, *more], "step", "m", unit=2.0) for more in ([], [{"step": 3, "m": 1}]))
    assert whole == Curve([1.0], [1.0], low=[0.5], high=[1.5]) and partly == Curve([1.0, 3.0], [1.0, 0.5])
    bars = ["LineCollection" in line("X", {"": each}, x="x", y="y").svg for each in (whole, partly)]
    assert bars == [True, False]


def sweep_of(*sizes: Size, **header: object) -> Sweep:
    described = report_folders.sweep_settings() | header
    better = described["quality"]["better"]
    return Sweep(
        name="by hand", header=described, sizes=sizes, unit="tokens", quality=described["quality"]["name"],
        quality_unit="", sign=1 if better == "higher" else -1, notes="", missing=(),
    )  # fmt: skip


def ok(batch_size: int, quality: float, seconds: float, heldout=(), *, reward: bool = False) -> Size:
    name = "eval_reward" if reward else "eval_loss"
    return Size(
        batch_size, "ok", heldout=heldout, higher_is_better=reward,
        steps=[{"step": 1, "step_time": seconds}], evaluations=[{"step": 1, name: quality}],
    )  # fmt: skip


def test_best_by_quality_by_speed_and_those_that_are_not_told_from_the_best():
    """Of their rows 16 is -0.1 and 0.3 behind, which may be none, and 32 twice 0.1, which is not."""
    best, close = ok(8, 2.0, 100, [1.0, 3.0]), ok(16, 2.1, 60, [0.9, 3.3])
    apart, unknown = ok(32, 2.1, 50, [1.1, 3.1]), ok(64, 2.5, 40)
    lost = replace(ok(128, 1.0, 1.0), status="out of memory")
    made = sweep_of(best, close, apart, unknown, lost)
    assert best_by_quality(made) is best and fastest(made.finished) is unknown
    assert not_told_from(made, best) == [close]
    said = {fact.what: fact[1:] for fact in sweep_facts(made)}
    assert said["Trade-off"][:2] == ("size 16", "1 min 0 s")
    alone = {fact.what: fact for fact in sweep_facts(sweep_of(best, apart))}
    assert not {"Not told from the best", "Trade-off"} & set(alone)
    alike = {fact.what: fact for fact in sweep_facts(sweep_of(unknown, ok(8, 2, 43.9), ok(16, 2, 44.1)))}
    assert alike["Fastest"].note.endswith("cannot tell: size 8.")

    low, high = ok(8, 0.5, 10, [0.2, 0.8], reward=True), ok(16, 0.8, 20, [0.75, 0.85], reward=True)
    other = sweep_of(low, high, quality={"name": "held-out reward", "better": "higher", "unit": ""})
    assert best_by_quality(other) is high and not_told_from(other, high) == [low]
    low, high = behind(other, low, high)  # 0.55 and 0.05
    assert low + high == pytest.approx(0.6)


def test_what_the_learning_rate_has_to_do_with_it():
    confounds = {
        "none": "the same at every size", "linear": "in proportion to the size",
        "sqrt": "with the square root of the size", None: "not known",
    }  # fmt: skip
    for scale_lr, words in confounds.items():
        (*_, fact) = sweep_facts(sweep_of(scale_lr=scale_lr))
        assert fact.value == words and "may be that of its learning rate" in fact.note
    tried = [{"learning_rate": rate, "heldout": end} for rate, end in ((1e-4, 2.0), (3e-4, 1.9), (1e-3, 1.8))]
    sizes = [
        replace(ok(size, 2, 1), task={"learning_rate": rate, "tuned": tried})
        for size, rate in ((8, 1e-3), (16, 3e-4))
    ]
    made = sweep_of(*sizes, scale_lr="tuned")
    (*_, fact) = sweep_facts(made)
    assert fact.value == "tuned at each size" and "tried at size 8: search further" in fact.note
    tries = {"size": "8", "0.0001": "2.000", "0.0003": "1.900", "0.001": "1.800"}
    assert rows(sweep_page(made), "Learning rates tried")["8"] == tries
