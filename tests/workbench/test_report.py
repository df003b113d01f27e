"""Reports: pages of a sweep, a run and several, what is broken or missing, and what figures say."""

import hashlib
import json
import re
from base64 import b64encode
from dataclasses import replace
from html import unescape
from itertools import combinations
from pathlib import Path

import chess
import numpy as np
import pytest
import report_folders
from commands import here
from report_folders import FEN, NEXT_FEN, completion, write_json, write_lines, write_run, write_sweep

from grpo.evaluate import Evaluation, quality
from grpo.evaluate.quality import Example
from grpo.play.record import Match
from grpo.play.thought import MoveChoice
from grpo.workbench import report
from grpo.workbench.report import make_page
from grpo.workbench.report.boards import (
    BAD,
    GOOD,
    WRONG_SQUARE,
    answer_card,
    best_and_worst,
    logged_completions,
)
from grpo.workbench.report.boards import completion_cards as cards
from grpo.workbench.report.charts import COLORS, PALETTE, _colors_of, histogram, line, stack
from grpo.workbench.report.read import SweepFolder, read_folder
from grpo.workbench.report.run import facts as run_facts
from grpo.workbench.report.run import run_content, with_token_rates
from grpo.workbench.report.sweep import sweep_content
from grpo.workbench.report.text import duration, number, show
from grpo.workbench.sizes import SizeResult

EVIL = "</pre><script>alert(1)</script>\n````\n<img src=x onerror=alert(1)>"
"""A completion is a model's output, and notes may hold anything."""


def titles(page: str) -> list[str]:
    return re.findall("<h2>(.*?)</h2>", page)


def section(page: str, title: str) -> str:
    return next(part for part in page.split("<section ") if f"<h2>{title}</h2>" in part)


def texts(pattern: str, html: str) -> list[str]:
    """Returns the text in tags, without those within."""
    return [unescape(re.sub("<[^>]+>", "", inside)) for inside in re.findall(pattern, html, re.DOTALL)]


def facts(page: str, title: str = "Summary") -> dict[str, list[str]]:
    """Value, interval and note by what they are of."""
    lines = re.findall("<div>(<dt>.*?)</div>", section(page, title))
    return {what: rest for what, *rest in (texts("<d[td].*?>(.*?)</d[td]>", line) for line in lines)}


def rows(page: str, title: str) -> dict[str, dict[str, str]]:
    """Returns the rows of a section's first table, by their first cell."""
    lines = re.findall("<tr>(.*?)</tr>", section(page, title).partition("</table>")[0], re.DOTALL)
    headings, *cells = (texts("<t[hd].*?>(.*?)</t[hd]>", line) for line in lines)
    return {row[0]: dict(zip(headings, row, strict=True)) for row in cells}


def cells(page: str, title: str, row: str) -> list[str]:
    """Returns the cells of one row, without the first."""
    return list(rows(page, title)[row].values())[1:]


def missing(page: str) -> list[str]:
    return texts("<p>(.*?)</p>", section(page, "What is missing"))


def pictures(html: str) -> list[str]:
    return texts("<strong>(.*?)</strong>", html)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> str:
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
    example = Example(f"P: {FEN}", " M: a6a8 E: 0.0 B: a6a8", " M: a6a8 E: 0.0 B: a1a1")
    quality.save(folder, *(dict.fromkeys(quality.MODES, score) for score in (before, after)), [example])
    results = ("1-0", "1/2-1/2", "0-1", "1-0", "1/2-1/2", "*")  # as White and Black in turn
    settings = {"temperature": 1.0, "illegal_moves": "resign"}
    match = Match.begin(("run step-000009", "rook-tiny"), settings, [chess.Board(FEN)] * 3, 6)
    for game, result in zip(match.games, results, strict=True):
        for move, how in (("a6a5", "best"), ("h5h4", "best"), ("d4e4", "candidate")):
            game.play(MoveChoice(chess.Move.from_uci(move), how))
        game.pgn.headers.update({"Result": result, "Termination": "stalemate"})
    (folder / "matches" / "a-match").mkdir(parents=True)
    match.save(folder / "matches" / "a-match")
    write_json(folder / "leak.json", {"leak": False})
    return folder


@pytest.fixture(scope="module")
def of_run(run_folder) -> str:
    return make_page([run_folder])


def test_the_page_of_a_sweep(sweep):
    """256 updates of 0.02 + 64 · 0.004 s, 2 s of compiling. Of a difference: 0.05 · t(9) / √9 = 0.038."""
    assert titles(sweep) == [
        "Summary",
        "Notes",
        "Results",
        "Learning curves",
        "Memory",
        "What the sizes had in common",
    ]
    shown = facts(sweep)
    assert shown["Best held-out loss"][:2] == ["size 64", "2.300 (2.270 to 2.330) nats a token"]
    assert shown["Not told from the best"][0] == "size 32, 128"
    assert shown["Trade-off"][:2] == ["size 64, 32", "1 min 13 s"]
    assert shown["Fastest"][:2] == ["size 256, 64", "1 min 9 s"]
    assert "cannot tell these apart" in shown["Fastest"][2]
    out_of_memory = ["out of memory", "4.72 GB predicted", "DefaultCPUAllocator: can't allocate memory"]
    assert shown["Size 512"] == out_of_memory
    assert shown["Learning rate"][:2] == ["the same at every size", "0.0003"]
    results = rows(sweep, "Results")
    assert results["64"] == {
        "size": "64",
        "status": "ok",
        "held-out": "2.300 (2.270 to 2.330)",
        "behind the best": "0.000",
        "time": "1 min 13 s",
        "tokens a second": "29,681",
        "memory": "0.81 GB",
        "tensors, predicted": "0.59 GB",
        "measured": "0.56 GB",
        "training": "2.253",
        "gap": "0.047",
        "best held-out": "2.300",
        "at": "100%",
        "updates": "256",
        "learning rate": "0.0003",
        "warm-up": "13",
        "start": "2.0 s",
    }
    assert results["32"]["behind the best"] == "0.012 (-0.026 to 0.050)"
    assert results["128"]["start"] == "2 min 30 s"
    names = ("status", "tensors, predicted", "measured", "behind the best")
    assert [results["512"][name] for name in names] == ["out of memory", "4.72 GB", "–", "–"]
    assert cells(sweep, "What the sizes had in common", "quality: unit") == ["nats a token"]
    assert pictures(sweep) == [
        "Held-out loss by batch size",
        "Quality against time",
        "Throughput",
        "Held-out loss over tokens",
        "Training loss over tokens",
        "Held-out loss over seconds of training",
        "Tensors by batch size",
        "Memory by batch size",
    ]


@pytest.mark.parametrize(
    "labels", [["truncated", "reward"], ["evaluate", "sample"], ["a", "b", "learn", "_c"]]
)
def test_curves_of_a_picture_have_colours_of_their_own(labels):
    colors = _colors_of(labels)
    assert len(set(colors.values())) == len(labels)
    assert all(colors[label] == COLORS[label] for label in labels if label in COLORS)


def test_the_page_of_a_run(of_run, run_folder):
    assert titles(of_run) == [
        "Summary",
        "Before and after",
        "Games",
        "Held-out quality",
        "Reward",
        "Policy",
        "What it wrote",
        "All logged completions",
        "Time",
        "Memory",
        "Where it ran",
        "Settings",
    ]
    assert facts(of_run) == {
        "Training reward": ["0.515 → 0.695", "", "Means of the first and the last 2 of 20 steps."],
        "Held-out reward": [
            "0.600 → 0.700",
            "0.660 to 0.740",
            "At step 0 and at step 20; the 95 % interval is the last one's.",
        ],
        "KL to the reference": ["0.04 nats a token", "", "At the end; the highest of a step was 0.04."],
        "Groups of equal rewards": ["25%", "", "They teach nothing but the KL."],
        "Time of a step": ["4.0 s", "1 min 20 s in all", "learn 50%, sample 25%, score 12%, other 12%"],
        "Tokens a second": ["500", "", "The median, prompts included."],
        "Phases that ran out of memory": ["1", "", "And went on with fewer rows: learn at step 3."],
        "Leak test": ["no leak", "", ""],
    }
    notes = {fact.what: fact.note for fact in run_facts(replace(read_folder(run_folder, ""), settings={}))}
    assert notes["Groups of equal rewards"] == "They teach nothing."
    ends = cells(of_run, "Held-out quality", "reward")
    assert ends == ["0.600 (0.560 to 0.640)", "0.700 (0.660 to 0.740)"]
    of_step_2 = ["32", "1.00 GB", "1.25 GB", "-20.0 %", "2.00 GB", "1"]
    assert cells(of_run, "Memory", "learn") == of_step_2
    assert cells(of_run, "Memory", "sample") == ["32", "1.00 GB", "0.80 GB", "+25.0 %", "2.00 GB", "0"]
    assert len({COLORS[name] for name in COLORS if name not in ("usable", "ran out")}) == 9


def test_what_a_run_of_language_modelling_wrote_is_shown_as_well(tmp_path):
    page = make_page([write_sweep(tmp_path / "sweep") / "size-00064"])
    assert facts(page)["Held-out loss"][0] == "5.500 → 2.300" and "Training loss" in facts(page)
    assert pictures(section(page, "Reward")) == ["Loss"]


def test_a_run_was_measured_before_and_after_and_played(of_run):
    measured = section(of_run, "Before and after")
    assert texts("<table>.*?<th.*?>(.*?)</th>", measured) == ["sampled", "greedy"]
    change = cells(of_run, "Before and after", "a legal move")
    assert change[:2] == ["50.0", "100.0"] and change[2].startswith("+50.0 (+")
    assert texts("<h3>(.*?)</h3>", measured) == ["position 1, before", "position 1, after"]
    assert "illegal" in texts('"remark">(.*?)</p>', measured)[1] and measured.count("<svg") == 2
    row = rows(of_run, "Games")["rook-tiny"]
    assert row["temperature"] == "1.0" and row["illegal moves"] == "resign" and "nodes" not in row
    assert [row[name] for name in ("games", "won", "drawn", "lost")] == ["5", "1", "2", "2"]
    assert row["score"].startswith("40.0 % (")
    assert (row["illegal a game"], row["first at"]) == ("0.60", "3")
    games = section(of_run, "Games")
    assert "The last game: run step-000009 against rook-tiny, 1/2-1/2" in games
    assert games.count("<svg") == 1 and FEN in games and "56. Ra5 h4 57. Ke4" in games


def test_pages_hold_what_files_say_as_text(of_run, sweep):
    """The only script is the page's own, which the policy names by its hash: nothing else may run."""
    assert "<script" not in sweep and "<h1>Title</h1>" in sweep
    (script,) = re.findall("<script>(.*?)</script>", of_run, re.DOTALL)
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in of_run and "alert" not in script
    for page in (of_run, sweep):
        assert page.count("<script") <= 1 and "<img" not in page and "&lt;script&gt;" in page


def test_a_page_says_where_the_run_was_started_each_time(of_run):
    started = rows(of_run, "Where it ran")
    assert started["command"] == {
        "": "command",
        "after step 0": "train_lean.py --steps 10",
        "after step 10": "train_lean.py --resume runs/run",
    }
    assert started["commit"]["after step 10"] == "–" and started["host"]["after step 0"] == "here"


def test_all_logged_completions_can_be_filtered_by_step_and_reward(of_run, run_folder, monkeypatch):
    """Each row has what it is found by; of many there are as many as fit, evenly over the steps."""
    found = re.findall('<tr data-step="(.*?)" data-reward="(.*?)"', section(of_run, "All logged completions"))
    assert len(found) == 8 and {step for step, _ in found} == {"20"}
    assert sorted(float(reward) for _, reward in found)[:2] == [0.0, 0.1]
    monkeypatch.setattr("grpo.workbench.report.run.MOST_COMPLETIONS", 4)
    some = run_content(read_folder(run_folder, ""))["logged"]
    assert len(some) == 4 and all(len(row["completion"]) <= 1003 for row in some)
    weighted = replace(read_folder(run_folder, ""), settings={"reward": ["policy"], "reward_weights": [2.0]})
    assert logged_completions(weighted)[0]["reward"] == 2.0


def test_token_rates_follow_from_the_running_count():
    lines = [{"num_tokens": 100, "step_time": 2.0}, {"step_time": 1.0}, {"num_tokens": 400, "step_time": 3.0}]
    assert [line.get("tokens_per_s") for line in with_token_rates(lines)] == [50, None, 100]


# Machado, Oliveira and Fernandes (2009), "A physiologically-based model for simulation of color vision
# deficiency": linear RGB at severity 1.
SIGHTS = {
    "all": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
}


def lab_of(color: str, sight: object) -> np.ndarray:
    """CIE L*a*b* under D65 of a colour as somebody with that sight sees it."""
    srgb = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    to_xyz = [[0.41246, 0.35758, 0.18044], [0.21267, 0.71515, 0.07218], [0.01933, 0.11919, 0.9503]]
    x = to_xyz @ np.clip(sight @ linear, 0, 1) / np.array([0.95047, 1, 1.08883])
    f = np.where(x > 216 / 24389, np.cbrt(x), (24389 / 27 * x + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", SIGHTS)
def test_colours_are_told_apart_with_any_sight(sight):
    """A distance of 2.3 can just be seen (Mahy and others 1994); those of lines have to be obvious."""
    colors = [lab_of(color, np.array(SIGHTS[sight])) for color in (*PALETTE, COLORS["all"])]
    assert min(np.linalg.norm(one - other) for one, other in combinations(colors, 2)) > 15


def test_a_page_needs_nothing_else(of_run, sweep):
    for page in (of_run, sweep):
        assert "default-src 'none'" in page and "@import" not in page
        links = re.sub(r'<div class="notes">.*?</div>', "", page, flags=re.DOTALL)
        assert not re.findall(r'(?:src|href)="(?!#|data:)|url\((?!#)', links)
        ids = re.findall(r'\bid="([^"]+)"', page)
        assert len(ids) == len(set(ids)) and set(re.findall(r'href="#([^"]+)"', page)) <= set(ids)


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
    """A figure that one of them lacks is a dash; a run without a step is left out."""
    a, b = write_run(tmp_path / "x" / "run"), write_run(tmp_path / "y" / "run", learning_rate=2e-5)
    (waiting := tmp_path / "waiting").mkdir()
    (waiting / "metrics.jsonl").write_text("")
    lines = [json.loads(line) for line in (b / "metrics.jsonl").read_text().splitlines()]
    lost = {name for line in lines for name in line if name == "kl" or name.endswith(("/low", "/high"))}
    write_lines(b / "metrics.jsonl", [{n: line[n] for n in line.keys() - lost} for line in lines])
    (b / "memory.jsonl").unlink()
    page = make_page([a, waiting, b])
    assert "<h1>Runs compared: x/run, y/run</h1>" in page  # of one name, and told apart
    assert any("left out" in line and "waiting" in line for line in logged)
    assert missing(page) == ["y/run: memory.jsonl is missing: memory by phase is not shown."]
    ends = {
        "KL to the reference": ["0.04 nats a token", "–"],
        "Training reward": ["0.515 → 0.695"] * 2,
        "Held-out reward": ["0.600 → 0.700"] * 2,
        "Time of a step": ["4.0 s"] * 2,
    }
    assert {what: cells(page, "How they ended", what) for what in ends} == ends
    assert cells(page, "Held-out quality", "reward") == ["0.700 (0.660 to 0.740)", "0.700"]
    differing = {"--learning-rate": {"setting": "--learning-rate", "x/run": "1e-05", "y/run": "2e-05"}}
    assert rows(page, "Where their settings differ") == differing
    assert page.count("-curve-") == 2


def test_sweeps_stand_side_by_side_and_one_that_was_cut_short_is_reported_as_far_as_it_goes(tmp_path):
    folder, other = write_sweep(tmp_path / "sweep"), write_sweep(tmp_path / "b")
    page = make_page([folder, other])
    assert titles(page) == ["Quality", "Results of sweep", "Results of b"] and page.count("-curve-") == 2
    assert facts(page, "Results of b")["Best held-out loss"][0] == "size 64"
    assert len(rows(page, "Results of b")) == 6
    header = report_folders.sweep_settings()
    write_json(other / "sweep.json", header | {"quality": {"name": "held-out reward", "better": "higher"}})
    assert "Not comparable" in section(make_page([folder, other]), "Quality")

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
    ]
    results = rows(page, "Results")
    status = [row["status"] for row in results.values()]
    assert status == ["ok", "unfinished", "ok", "ok", "not run", "out of memory"]
    assert results["128"]["held-out"] == "–" and facts(page)["Size 256"][0] == "not run"
    assert results["16"]["behind the best"] == "0.098"  # what cannot be paired has no interval
    assert "Not told from the best" not in facts(page)
    (folder / "sweep.json").write_text('{"objec')
    for ended in folder.glob("size-*/ended.json"):
        ended.write_text("{}")
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
        "settings are not known",
        "completions.jsonl is missing",
        "memory.jsonl is missing",
        "Before and after training is not shown",
        "A match is not shown",
    ):
        assert sum(words in sentence for sentence in lacks) == 1, words
    absent = {"What it wrote", "All logged completions", "Memory", "Settings", "Games", "Before and after"}
    assert len(lacks) == 5 and not absent & set(titles(page))

    folder = write_run(tmp_path / "begun")
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5, "kl": null}\n{"step": 2, "rew')
    page = make_page([folder])
    (broken,) = missing(page)
    assert broken.startswith("metrics.jsonl has lines that cannot be read, 1 of them")
    assert page.count("curve-0") == 2 + 2  # rewards of steps and of completions, and memory


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
    arrows = re.findall(r'<line[^>]*stroke="(#\w+)"', " ".join(card.boards))
    assert set(arrows) == ({arrow} if arrow else set())
    assert words in unescape(" ".join([*card.boards, card.remark]))
    if words in ("predicted: right", "wrong on a4, a5"):  # the pawn is still on a4 and not on a5
        assert card.boards[1].count(WRONG_SQUARE) == 2 * ("wrong" in words)


def test_the_gallery_holds_the_best_and_the_worst_of_each_task_as_the_run_weighed_them(tmp_path):
    asked = {"policy": f"P: {FEN}", "answer": ASKED}
    records = [
        completion(9, f"{what} {n}", prompt=f"{prompt}{n}", reward=n / 100)
        for what, prompt in asked.items()
        for n in range(20)
    ]

    def chosen(completions: list[dict]) -> list[str]:
        by_task = best_and_worst(completions, {}).values()
        return [record["completion"] for records in by_task for record in records]

    ends = [f"{what} {n}" for what in asked for n in (19, 18, 17, 2, 1, 0)]
    assert chosen([*records, *records[:3]]) == ends  # the same text again
    alike = [completion(9, str(n), reward=n / 10) for n in range(5)] + records[:1]
    assert chosen(alike) == ["4", "policy 0", "3", "2", "1", "0"]

    weighed = {"reward": ["my.py:brevity", "my.py:letter"], "reward_weights": [1.0, 2.0]}
    folder = write_run(tmp_path / "talk", **weighed)
    one = {"step": 1, "prompt": "a", "completion": "x", "rewards": {"brevity": 1.0, "letter": 0.0}}
    other = {"step": 1, "prompt": "b", "completion": "y", "rewards": {"brevity": 0.0, "letter": 0.9}}
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    talk = {
        "step": 1,
        "prompt": "<|start|>",
        "messages": messages,
        "completion": "4",
        "rewards": {"brevity": 0.5},
        "terminated": False,
        "num_tokens": 9,
    }
    write_lines(folder / "completions.jsonl", [one, other, talk])
    run = read_folder(folder, "talk")
    assert [card.completion for card in cards(run)] == ["y", "x", "4"]
    assert [card.completion for card in cards(replace(run, settings={}))] == ["x", "y", "4"]
    assert cards(run)[2].prompt == "system: Be brief.\nuser: 2 + 2?"
    assert cards(run)[2].remark == "Cut off after 9 tokens."


def test_numbers_times_and_settings():
    numbers = {31387.4: "31,387", 0.5: "0.5", 2.34567: "2.346", 1.25e-5: "1.25e-05", 0: "0", -0.25: "-0.25"}
    assert {value: number(value) for value in numbers} == numbers
    times = {0.0123: "0.012 s", 4.25: "4.2 s", 59.96: "1 min 0 s", 124: "2 min 4 s", 3900: "1 h 5 min"}
    assert {value: duration(value) for value in times} == times
    values = ([1, "x"], [], None, True, 2e6, float("inf"))
    assert [*map(show, values)] == ["1 x", "none", "–", "on", "2,000,000", "inf"]
    assert show(3 * 2**30, "e_bytes") == "3.00 GB" and show(0.5, "eval_reward") == "0.500"


def test_curves_have_bars_where_all_points_have_intervals_and_nothing_is_drawn_of_none():
    records = [{"step": 1, "m": 2.0, "m/low": 1.0, "m/high": 3.0}, {"step": 2, "n": 5.0}]
    whole, partly = (
        line("X", [*records, *more], "step", {"m": "m"}, y="y", unit=2.0)
        for more in ([], [{"step": 3, "m": 1}])
    )
    assert "LineCollection" in whole and "LineCollection" not in partly
    assert "<use" in whole and 'id="x-curve-0"' in whole  # a point alone is seen
    assert line("X", records, "step", {"a": "nothing"}, y="y") == ""


def sweep_of(*sizes: SizeResult, **header: object) -> SweepFolder:
    described = report_folders.sweep_settings() | header
    better, name = described["quality"]["better"], described["quality"]["name"]
    return SweepFolder(
        name="by hand",
        header=described,
        sizes=sizes,
        unit="tokens",
        quality=name,
        quality_unit="",
        sign=1 if better == "higher" else -1,
        notes="",
        missing=(),
    )


def ok(batch_size: int, quality: float, seconds: float, heldout=(), *, reward: bool = False) -> SizeResult:
    name = "eval_reward" if reward else "eval_loss"
    return SizeResult(
        batch_size,
        "ok",
        heldout=heldout,
        higher_is_better=reward,
        steps=[{"step": 1, "step_time": seconds}],
        evaluations=[{"step": 1, name: quality}],
    )


def facts_of(sweep: SweepFolder) -> dict[str, tuple[str, ...]]:
    return {fact.what: fact[1:] for fact in sweep_content(sweep)["facts"]}


def test_best_by_quality_by_speed_and_those_that_are_not_told_from_the_best():
    """Rows of size 16 are -0.1 and 0.3 behind, which may be none, and of 32 twice 0.1, which is not."""
    best, close = ok(8, 2.0, 100, [1.0, 3.0]), ok(16, 2.1, 60, [0.9, 3.3])
    apart, unknown = ok(32, 2.1, 50, [1.1, 3.1]), ok(64, 2.5, 45.5)
    lost = replace(ok(128, 1.0, 1.0), status="out of memory")
    shown = facts_of(sweep_of(best, close, apart, unknown, lost))
    assert shown["Best held-out loss"][0] == "size 8" and shown["Not told from the best"][0] == "size 16"
    assert shown["Trade-off"][:2] == ("size 16", "1 min 0 s")
    assert shown["Fastest"][:2] == ("size 64, 32", "45.5 s") and "at most a tenth" in shown["Fastest"][2]
    # A size that is called fastest alone is not one of several that cannot be told apart above.
    near = facts_of(sweep_of(ok(8, 2.0, 62, [1.0, 3.0]), close))
    assert near["Trade-off"][0] == near["Fastest"][0] == "size 16, 8"
    assert not {"Not told from the best", "Trade-off"} & set(facts_of(sweep_of(best, apart)))

    low, high = ok(8, 0.5, 10, [0.2, 0.8], reward=True), ok(16, 0.8, 20, [0.75, 0.85], reward=True)
    rewards = sweep_of(low, high, quality={"name": "held-out reward", "better": "higher", "unit": ""})
    assert facts_of(rewards)["Best held-out reward"][0] == "size 16"
    assert facts_of(rewards)["Not told from the best"][0] == "size 8"
    behind = sweep_content(rewards)["sizes"][0]
    assert behind["behind/low"] + behind["behind/high"] == pytest.approx(0.6)  # 0.55 and 0.05


def test_what_the_learning_rate_has_to_do_with_it():
    confounds = {"none": "the same at every size", "linear": "in proportion to the size", None: "not known"}
    for scale_lr, words in confounds.items():
        value, _, note = facts_of(sweep_of(scale_lr=scale_lr))["Learning rate"]
        assert value == words and "may be that of its learning rate" in note
    tried = [{"learning_rate": rate, "heldout": end} for rate, end in ((1e-4, 2.0), (3e-4, 1.9), (1e-3, 1.8))]
    sizes = [
        replace(ok(size, 2, 1), task={"learning_rate": rate, "tuned": tried})
        for size, rate in ((8, 1e-3), (16, 3e-4))
    ]
    made = sweep_of(*sizes, scale_lr="tuned")
    value, _, note = facts_of(made)["Learning rate"]
    assert value == "tuned at each size" and "tried at size 8: search further" in note
    tries = {"size": "8", "0.0001": "2.000", "0.0003": "1.900", "0.001": "1.800"}
    assert sweep_content(made)["tries"][0] == tries


def test_phases_are_stacked_the_longest_below_and_those_that_took_nothing_are_left_out():
    records = [{"step": 1, "a": 1.0, "b": 3.0, "c": 0.0}, {"step": 2, "b": 3.0}]
    drawn = stack("Time", records, "step", {"a": "a", "b": "b", "c": "c"}, y="seconds")
    assert texts("<text[^>]*>(.*?)</text>", drawn)[-2:] == ["B", "A"]  # the legend
    assert drawn.count('id="Time-layer-'.lower()) == 2
    assert stack("Time", records, "step", {"c": "c"}, y="seconds") == ""


def test_a_histogram_is_of_shares_and_there_is_none_of_nothing():
    drawn = histogram("Rewards", {"first": [0.0] * 3 + [1.0], "last": []}, x="reward", y="share")
    assert texts("<text[^>]*>(.*?)</text>", drawn)[-1] == "First" and "0.75" not in drawn
    assert histogram("Rewards", {"first": []}, x="reward", y="share") == ""


def test_a_picture_of_zeros_alone_can_be_left_out():
    records = [{"step": step, "clipped": 0.0} for step in range(3)]
    curve = {"": "clipped"}
    assert line("Clipped", records, "step", curve, y="share", unless_zero=True) == ""
    assert line("Clipped", records, "step", curve, y="share") != ""
