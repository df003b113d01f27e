"""Reports: pages of a sweep, a run and several, what is broken or missing, and what a sweep's figures say."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import report_folders
from commands import here
from report_folders import FEN, GB, NEXT_FEN, completion, write_lines, write_run, write_sweep

from grpo.evaluate import Evaluation, quality
from grpo.evaluate.quality import Example, Quality
from grpo.play.record import Game, Match
from grpo.workbench import report
from grpo.workbench.report import findings, make_page, trend
from grpo.workbench.report.boards import BAD, GOOD, draw_boards
from grpo.workbench.report.compare import lacking, verdict
from grpo.workbench.report.figures import Curve, draw, phase_color
from grpo.workbench.report.gallery import cards, chosen
from grpo.workbench.report.page import to_html
from grpo.workbench.report.read import Run, Size, Sweep, read_folder, read_run
from grpo.workbench.report.run import summary
from grpo.workbench.report.sections import Page, Section
from grpo.workbench.report.wording import duration, listed, number, rounded

EVIL = "</pre><script>alert(1)</script>\n````\n<img src=x onerror=alert(1)>"
"""A completion is a model's output, and notes may hold anything."""


def titles(page: Page) -> list[str]:
    return [section.title for section in page.sections]


def section(page: Page, title: str) -> Section:
    return next(each for each in page.sections if each.title == title)


def said(page: Page, title: str) -> str:
    return " ".join(section(page, title).sentences)


def missing(page: Page) -> list[str]:
    assert to_html(page)
    return section(page, "What is missing").sentences


def rows(page: Page, title: str) -> dict[str, tuple[str, ...]]:
    """Of a section's first table, by their first cell."""
    return {row[0]: row[1:] for row in section(page, title).tables[0].rows}


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
    quality.save(folder, Quality(before, before), Quality(after, after), [shown])
    results = ("1-0", "1/2-1/2", "0-1", "1-0", "1/2-1/2", "*")  # as White and Black in turn
    games = [
        Game(FEN, number % 2 == 0, ["a6a5", "h5h4", "d4e4"], {2: "candidate"}, result, "stalemate")
        for number, result in enumerate(results)
    ]
    match = Match(("run step-000009", "rook-tiny"), {"temperature": 1.0, "illegal_moves": "resign"}, games)
    (folder / "matches" / "a-match").mkdir(parents=True)
    match.save(folder / "matches" / "a-match")
    return folder


@pytest.fixture(scope="module")
def of_run(run_folder) -> Page:
    return make_page([run_folder])


def test_the_page_of_a_sweep(sweep):
    assert titles(sweep) == [
        "What it says", "Notes", "Results", "Learning curves", "Quality against batch size", "Time",
        "Memory", "What the sizes had in common",
    ]  # fmt: skip
    assert "size 64 is best: 2.300" in said(sweep, "What it says")
    assert "Sizes 32 and 128 are within the noise" in said(sweep, "What it says")
    assert "Size 128 does not fit" in said(sweep, "Time")
    results = rows(sweep, "Results")
    # 256 updates of 0.02 + 64 · 0.004 s and 2 s of compiling
    assert results["64"][:5] == ("ok", "256", "3e-4", "13", "1 min 13 s")
    assert results["64"][6:10] == ("2.250", "2.300 ± 0.012", "2.299 at 2.0 M", "0.050")
    assert results["512"][0] == "out of memory" and set(results["512"][3:]) == {"–"}
    budget = rows(sweep, "Memory")
    assert budget["activations"] == ("1.75 GB", "3.50 GB") and budget["predicted"][1] == "4.80 GB"


def test_the_page_of_a_run(of_run, run_folder):
    assert titles(of_run) == [
        "What it says", "Before and after", "Games", "Held-out quality", "Reward", "Policy", "What it wrote",
        "Time", "Memory", "Settings",
    ]  # fmt: skip
    summed = said(of_run, "What it says")
    assert "training reward went from 0.515 (first 2 steps) to 0.695 (last 2 steps)" in summed
    assert "held-out reward went from 0.600 to 0.700 at step 20. Its 95 % interval over prompts, " in summed
    assert "does not hold the first value" in summed and "In 25 % of the groups" in summed
    assert "4.0 s in the median, and all of them 1 min 20 s: 50 % learn, 25 % sample" in said(of_run, "Time")
    assert "learn at step 3" in said(of_run, "Memory")
    few = [report_folders.evaluation(step) for step in (0, 4)]  # 0.62 ± 0.04
    assert "holds the first value" in " ".join(summary(replace(read_folder(run_folder), evaluations=few)))
    assert rows(of_run, "Held-out quality")["reward"] == ("0.600 (0.560 to 0.640)", "0.700 (0.660 to 0.740)")
    memory = rows(of_run, "Memory")
    assert memory["learn"] == ("32", "1.00 GB", "1.25 GB", "-20.0 %", "2.00 GB", "1")  # of step 2
    assert memory["sample"] == ("32", "1.00 GB", "0.80 GB", "+25.0 %", "2.00 GB", "0")
    phases = ("sample", "score", "learn", "other", "reward", "update", "wait", "reduce")
    assert len({phase_color(phase) for phase in phases}) == len(phases)
    (figure,) = draw("x", "X", [Curve("a", [1.0], [2.0])], x="step", y="y")
    assert "<use" in figure.svg and 'id="x-curve-0"' in figure.svg  # one point is seen
    assert draw("x", "X", [Curve("a", [], [])], x="step", y="y") == []


def test_a_run_was_measured_before_and_after_and_played(of_run):
    found = section(of_run, "Before and after")
    assert [table.columns[0] for table in found.tables] == ["sampled", "greedy"]
    assert found.tables[0].rows[0][:4] == ("a legal move", "50.0", "100.0", "+50.0")
    assert [card.title for card in found.cards] == ["position 1, before", "position 1, after"]
    assert "illegal" in found.cards[1].remark and found.cards[0].boards
    found = section(of_run, "Games")
    assert "scored 40.0 % against rook-tiny in 5 games" in found.sentences[0]
    assert "too close to tell" in found.sentences[0]
    (row,) = found.tables[0].rows
    assert row[2:6] == ("5", "1", "2", "2") and row[6].startswith("40.0 % (") and row[8:] == ("0.60", "3")
    assert [card.title[:6] for card in found.cards] == ["game 1", "game 2", "game 3"]
    first = found.cards[0]
    assert len(first.boards) == 2 and first.prompt == FEN and first.completion == "56. Ra5 h4 57. Ke4"
    assert first.remark == "Illegal answers at half-move 3." and found.cards[1].remark == ""
    assert "game 3: run step-000009 against rook-tiny, 0-1" in to_html(of_run)


def test_pages_hold_what_files_say_as_text(of_run, sweep):
    html = to_html(of_run)
    assert "<script" not in html and "<img" not in html and "&lt;script&gt;" in html
    html = to_html(sweep)
    assert "<script" not in html and "<img" not in html and "<h3>Title</h3>" in html


def test_a_page_needs_nothing_else(of_run):
    text = to_html(of_run)
    assert "default-src 'none'" in text and "@import" not in text
    assert not re.findall(r'(?:src|href)="(?!#|data:)|url\((?!#)', text)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)) and set(re.findall(r'href="#([^"]+)"', text)) <= set(ids)


def test_the_command_writes_where_the_page_belongs(sweep, tmp_path, monkeypatch):
    """Into the one folder, or for several into one of their own."""
    monkeypatch.setattr(report, "make_page", lambda folders: sweep)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    for folders, target in ((["a"], "a"), (["a", "b"], "report")):
        assert here("report", *folders).stdout.split() == [f"{target}/report.html"]
        assert (tmp_path / target / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_runs_with_different_metrics_are_compared_as_far_as_it_goes(tmp_path, logged):
    """Completions of the same prompts stand side by side; a run without a step is left out."""
    a, b = write_run(tmp_path / "x" / "run"), write_run(tmp_path / "y" / "run", learning_rate=2e-5)
    (waiting := tmp_path / "waiting").mkdir()
    (waiting / "metrics.jsonl").write_text("")
    lines = [json.loads(line) for line in (b / "metrics.jsonl").read_text().splitlines()]
    without = [{name: value for name, value in line.items() if name != "kl"} | {"new": 1} for line in lines]
    write_lines(b / "metrics.jsonl", without)
    page = make_page([a, waiting, b])
    assert page.title == "Runs compared: x/run and y/run"  # of one name, and told apart
    assert any("left out" in line and "waiting" in line for line in logged)
    assert missing(page) == ["x/run has no new.", "y/run has no kl."]
    ends = rows(page, "How they ended")
    assert ends["training kl"] == ("0.039", "–") and ends["training reward"] == ("0.695", "0.695")
    assert rows(page, "Where their settings differ")["--learning-rate"] == ("1e-05", "2e-05")
    shown = section(page, "The same prompts").cards
    assert [card.title.split(",")[0] for card in shown] == ["x/run", "y/run"] * 2
    assert shown[0].prompt == shown[1].prompt != shown[2].prompt
    assert to_html(page).count('class="board"') == 6  # one of a policy prompt, two of an environment prompt


def test_who_ended_higher_and_that_intervals_do_not_say_by_chance_or_not():
    def run_with(name: str, reward: float, **interval: float) -> Run:
        line = {f"eval_reward/{end}": at for end, at in interval.items()} | {"step": 9, "eval_reward": reward}
        return Run(name, {}, [{"step": 1, "reward": 0.5}], [line], [], [], {}, [])

    best, old = run_with("best", 0.8, low=0.7, high=0.9), run_with("old", 0.5)
    near, far = run_with("near", 0.7, low=0.6, high=0.75), run_with("far", 0.5, low=0.4, high=0.69)
    highest, near, far, chance = verdict([near, best, far])
    assert highest.startswith("best ended with the highest") and "0.800 (0.700 to 0.900)" in highest
    assert near == "near ended 0.100 lower, 0.700 (0.600 to 0.750)."
    assert far == "far ended 0.300 lower, 0.500 (0.400 to 0.690)."
    assert "on the same prompts, which grpo-lean evaluate gives" in chance
    assert verdict([best, old])[1] == "old ended 0.300 lower, 0.500."
    assert "Fewer than two" in verdict([best, replace(best, evaluations=[])])[0]
    assert lacking([best, best]) == [] and lacking([best, old]) == ["old has no intervals."]


def test_a_sweep_is_compared_with_another_and_one_that_was_cut_short_is_reported_as_far_as_it_goes(tmp_path):
    folder = write_sweep(tmp_path / "sweep")
    page = make_page([folder, write_sweep(tmp_path / "b")])
    assert rows(page, "What it says")["best by quality"] == ("64, 2.300 nats a token, 1 min 13 s",) * 2
    assert [figure.name for figure in section(page, "Curves").figures] == ["quality", "throughput", "seconds"]
    for name, left in (("size-00032.json", 0.5), ("size-00064.jsonl", 0.99)):
        text = (folder / name).read_text()
        (folder / name).write_text(text[: int(left * len(text))])
    for name in ("size-00128.json", "size-00256.json", "size-00256.jsonl"):
        (folder / name).unlink()
    broken = report_folders.size_row(16) | {"final_heldout": None, "seconds": "x"}
    (folder / "size-00016.json").write_text(json.dumps(broken))
    page = make_page([folder])
    expected = (
        ("size-00016.json", "no seconds"), ("size-00016.json", "no final_heldout"),
        ("size-00032.json", "size 32 are missing"), ("size-00064.jsonl", ""),
        ("Size 128", "unfinished"), ("Size 256", "not run"),
    )  # fmt: skip
    for sentence, (what, words) in zip(missing(page), expected, strict=True):
        assert sentence.startswith(what) and words in sentence
    status = [row[1] for row in section(page, "Results").tables[0].rows]
    assert status == ["ok", "unreadable", "ok", "unfinished", "not run", "out of memory"]
    (folder / "sweep.json").write_text('{"version": 1, "objec')
    for each in folder.glob("size-*.json"):
        each.write_text("{}")
    page = make_page([folder])
    assert "No size finished" in said(page, "What it says")
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
    broken, lacked = missing(page)
    assert broken.startswith("metrics.jsonl has a line that cannot be read")
    assert lacked.startswith("The run logged no KL and no times") and lacked.endswith("no evaluations.")
    assert to_html(page).count("curve-0") == 1 + 1  # the reward, and memory


ASKED = f"A: {FEN}+a4a5+a4a5+"


@pytest.mark.parametrize(
    ("prompt", "text", "boards", "arrow", "words"),
    [
        (f"P: {FEN}", "M: a4a5 E: 0.3 B: a4a5", 1, GOOD, "White to move: a5"),
        (f"P: {FEN}", "M: d4g8 E: 0.3 B: d4g8", 1, BAD, "d4g8 is illegal here"),
        (f"P: {FEN}  ", "B: resign", 1, None, "No best move can be read"),
        (ASKED, f"{NEXT_FEN}+0.001+0+0", 2, GOOD, "predicted, right"),
        (ASKED, f"{FEN}+0.001+0+0", 2, GOOD, "wrong on the red"),
        (ASKED, NEXT_FEN.replace("b -", "w -"), 2, GOOD, "in a field"),
        (f"A: {FEN}+a4b7+a4b7+", f"{FEN}+-1.0+0+1", 2, BAD, "which is illegal"),
        (ASKED, "8/8", 1, GOOD, "No next position can be read"),
        ("Say hello", "hello", 0, None, ""),
        ("P: no position", "B: a4a5", 0, None, ""),
    ],
)
def test_boards(prompt, text, boards, arrow, words):
    drawn = draw_boards(prompt, text, "x")
    assert len(drawn.boards) == boards
    arrows = re.findall(r'<line[^>]*stroke="(#\w+)"', " ".join(board.svg for board in drawn.boards))
    assert set(arrows) == ({arrow} if arrow else set())
    assert words in " ".join([*(board.caption for board in drawn.boards), drawn.remark])
    if words in ("predicted, right", "wrong on the red"):  # the pawn is still on a4 and not on a5
        assert drawn.boards[1].svg.count("#e8a39b") == 2 * ("wrong" in words)


def test_the_gallery_holds_the_best_and_the_worst_of_each_task_as_the_run_weighed_them(tmp_path):
    asked = {"policy": f"P: {FEN}", "answer": ASKED}
    records = [
        completion(9, f"{what} {n}", prompt=f"{prompt}{n}", reward=n / 100)
        for what, prompt in asked.items() for n in range(20)
    ]  # fmt: skip
    run = Run("r", {}, [], [], [*records, *records[:3]], [], {}, [])  # the same text again
    ends = [f"{what} {n}" for what in asked for n in (19, 18, 17, 2, 1, 0)]
    assert [each["completion"] for each in chosen(run, 12)] == ends
    one = {"prompt": "a", "completion": "x", "rewards": {"brevity": 1.0, "letter": 0.0}}
    other = {"prompt": "b", "completion": "y", "rewards": {"brevity": 0.0, "letter": 0.9}}
    settings = {"reward": ["my.py:brevity", "my.py:letter"], "reward_weights": [1.0, 2.0]}
    run = replace(run, settings=settings, completions=[one, other])
    assert chosen(run, 2) == [other, one] and chosen(replace(run, settings={}), 2) == [one, other]
    folder = write_run(tmp_path / "talk")
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    record = {"step": 1, "prompt": "<|start|>", "messages": asked, "completion": "4", "rewards": {"f": 1.0}}
    write_lines(folder / "completions.jsonl", [record])
    (card,) = cards(read_run(folder))
    assert card.prompt == "system: Be brief.\nuser: 2 + 2?" and card.completion == "4"


def sweep_of(*sizes: Size, **settings: object) -> Sweep:
    return Sweep("by hand", report_folders.sweep_settings() | settings, sizes, "", [])


def ok(batch_size: int, heldout: float, seconds: float, **figures: object) -> Size:
    updates = 1000 // batch_size
    return Size(batch_size, "ok", final_heldout=heldout, seconds=seconds, updates=updates, **figures)


def test_numbers_times_lists_and_large_counts():
    numbers = {31387.4: "31,387", 0.5: "0.5", 2.34567: "2.346", 1.25e-5: "1.25e-5", 0: "0", -0.25: "-0.25"}
    assert {value: number(value) for value in numbers} == numbers
    times = {0.0123: "0.012 s", 4.25: "4.2 s", 59.96: "1 min 0 s", 124: "2 min 4 s", 3900: "1 h 5 min"}
    assert {value: duration(value) for value in times} == times
    assert [listed(items) for items in ([], [1], [1, 2], [1, 2, 3])] == ["", "1", "1 and 2", "1, 2 and 3"]
    assert [rounded(count) for count in (512, 1536, 1_997_152)] == ["512", "1.5 k", "2.0 M"]


def test_best_by_quality_by_speed_and_the_trade_off_with_and_without_a_measured_spread():
    """2.019 is within 1 % of 2.00, 2.03 is not. Of a difference: 1.96 · √(0.003² + 0.004²) = 0.0098."""
    a, b, c, d = ok(8, 2.00, 100), ok(16, 2.019, 60), ok(32, 2.03, 50), ok(64, 2.50, 40)
    made = sweep_of(a, b, c, d, Size(128, "out of memory", final_heldout=1.0, seconds=1.0))
    assert (findings.best_by_quality(made), findings.fastest(made), findings.trade_off(made)) == (a, d, b)
    best, speed, both = findings.best_sentences(made)
    assert "size 8 is best: 2.000 nats a token" in best and "No spread was measured" in best
    assert "size 64 is best: the same work in 40.0 s, 2.5 times as fast as size 8" in speed
    assert "size 16: 40 % less time than size 8, 0.019 nats a token worse" in both
    low, high = ok(8, 0.50, 10, final_train=0.6), ok(16, 0.80, 20, final_train=0.7)
    other = sweep_of(low, high, quality={"name": "held-out reward", "better": "higher", "unit": ""})
    assert findings.best_by_quality(other) is high and findings.trade_off(other) is high
    assert [findings.gap(size, other) for size in (low, high)] == pytest.approx([0.1, -0.1])
    assert findings.gap(low, sweep_of(low, high, objective="grpo")) is None  # sampled, and greedy
    close = findings.best_sentences(sweep_of(a, d, ok(128, 2.5, 43.9), ok(256, 2.5, 44.1)))[1]
    assert "40.0 s, 2.5 times as fast" in close and "(size 128 took at most a tenth longer" in close

    best = ok(8, 2.0, 9, heldout_stderr=0.003)
    inside, outside = (ok(*figures, heldout_stderr=0.004) for figures in ((16, 2.0097, 9), (32, 2.0099, 9)))
    made = sweep_of(best, inside, outside, ok(64, 2.0, 9))
    assert findings.within_noise(made, best) == [inside]
    assert "Size 16 is within the noise" in findings.best_sentences(made)[0]
    best, close = ok(8, 2.0, 90, heldout_stderr=0.1), ok(16, 2.2, 50, heldout_stderr=0.1)
    assert findings.trade_off(sweep_of(best, close)) is close
    assert findings.trade_off(sweep_of(best, replace(close, heldout_stderr=None))) is best


def test_what_is_said_of_times_memory_failures_and_learning_rates_of_sizes(tmp_path):
    """One wild point does not move the line. A quality is reached at the first point at least as good.

    512 rows of 7 MB and of 2 MB, 56 MB, and a quarter of a GB: 4.80 GB, of which 3.5 are 73 %.
    """
    assert trend.fit_line([1, 2, 4, 8, 16], [3, 5, 99, 17, 33]) == trend.Line(1, 2)
    falling = trend.fit_line([1, 2, 4], [4, 3, 2])
    assert falling.start >= 0 and falling.slope >= 0
    an_update = {8: 1.8, 16: 2.6, 32: 4.2, 64: 14.8, 128: 13.8}  # on 1 + 0.1 for each row, but 7.4 at 64
    sizes = [Size(n, "ok", updates=1024 // n, seconds=1024 // n * s) for n, s in an_update.items()]
    ((size, factor),) = trend.off_trend(sweep_of(*sizes))
    assert size.batch_size == 64 and factor == pytest.approx(2)
    told = " ".join(trend.trend_sentences(sweep_of(*sizes)))
    assert "Size 64 does not fit: it takes 2.0 times what the line says." in told
    assert "too few for a trend" in trend.trend_sentences(sweep_of(*sizes[:2]))[0]

    values = (0, 5.0), (10, 3.0), (20, None), (30, 2.0), (40, 2.5)
    size = ok(8, 2.5, 40, curve=[{"done": 8 * s, "seconds": s, "heldout": h} for s, h in values])
    reached = {5.0: 10, 3.0: 10, 2.9: 30, 1.0: None}  # not by the untrained model
    assert {goal: findings.seconds_to_reach(sweep_of(size), size, goal) for goal in reached} == reached

    high = Size(8, "ok", predicted_bytes=1.1 * GB, peak_bytes=GB)
    low = Size(16, "ok", predicted_bytes=1.6 * GB, peak_bytes=2 * GB)
    (held,) = findings.memory_sentences(sweep_of(high, low))
    assert "within 20 % of those measured, the furthest at size 16 (too low)" in held
    (failed,) = findings.failure_sentences(read_folder(write_sweep(tmp_path / "sweep")))
    assert failed.startswith("Size 512: out of memory (DefaultCPUAllocator: can't allocate memory).")
    assert "4.80 GB of 4.00 GB usable, most of it for activations (3.50 GB, 73 %)" in failed

    confounds = {
        "none": "the same at every size (3e-4) and was not tuned", "linear": "in proportion to the batch",
        "sqrt": "the square root of the batch", "tuned": "tuned at each size", None: "is not known",
    }  # fmt: skip
    for scale_lr, words in confounds.items():
        assert words in findings.confound(sweep_of(scale_lr=scale_lr))
    tried = [(1e-4, 2.0), (3e-4, 1.9), (1e-3, 1.8)]
    sizes = (Size(size, "ok", learning_rate=rate, tuned=tried) for size, rate in ((8, 1e-3), (16, 3e-4)))
    assert "At size 8 the best rate" in findings.confound(sweep_of(*sizes, scale_lr="tuned"))
