"""Reports as a browser shows them: curves and boards are there, nothing is fetched, nothing sticks out."""

import json
import re
import shutil
import subprocess
from html import escape
from pathlib import Path

import pytest
from report_folders import write_run, write_sweep

from grpo.workbench.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
OWN = "not an origin"
"""The initiator of what the browser asks for on its own account."""
MEASURE = """<script>
const letters = [...document.querySelectorAll(".picture svg")].flatMap(svg =>
  [...svg.querySelectorAll("text")].map(text =>
    parseFloat(getComputedStyle(text).fontSize) * svg.clientWidth / svg.viewBox.baseVal.width));
const words = [...document.querySelectorAll("p, li, dt, dd, td, th, pre, figcaption, h3")].map(each =>
  parseFloat(getComputedStyle(each).fontSize));
parent.document.title = JSON.stringify(
  [document.documentElement.scrollWidth, Math.min(...letters), Math.min(...words),
   Math.max(...[...document.querySelectorAll("tr:not([data-step])")].map(row => row.clientHeight))]);
</script>"""
KINDS = ("sweep", "run", "runs")


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    sweep, runs = write_sweep(folder / "a-sweep"), [write_run(folder / name) for name in ("one", "two")]
    given = {"sweep": [sweep], "run": runs[:1], "runs": runs}
    return {kind: write_report(folders, folder / kind) for kind, folders in given.items()}


def browse(page: Path, folder: Path) -> tuple[str, list[str]]:
    """The document as Chromium has it in the end, and the addresses it asked for that are no file."""
    log = folder / "net.json"
    done = subprocess.run(
        [
            str(CHROMIUM),
            *FLAGS,
            f"--user-data-dir={folder / 'profile'}",
            f"--log-net-log={log}",
            "--window-size=1400,900",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(log.read_text())
    start = content["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    started = [event.get("params", {}) for event in content["events"] if event["type"] == start]
    asked = [each["url"] for each in started if "url" in each and each.get("initiator") != OWN]
    return done.stdout, [url for url in asked if not url.startswith(("file:", "data:"))]


@pytest.mark.parametrize(
    ("kind", "pictures", "curves", "boards", "arrows"),
    [
        # 3 and 5 of quality, 1 of throughput; 3 · 6 learning curves; 3 and 2 of memory
        pytest.param("sweep", 8, 9 + 18 + 5, 0, 0, id="sweep"),
        # 3 held out; 3, 2 and 1 of rewards, 1 of completions; 1, 3, 3, 1, 1, 1 of the policy; 1 of tokens a
        # second; 2 · 3 and 3 of memory
        pytest.param("run", 17, 3 + 6 + 1 + 10 + 1 + 9, 8, 5, id="run"),
        pytest.param("runs", 1, 2, 0, 0, id="runs"),
    ],
)
def test_curves_and_boards_are_there_and_nothing_is_fetched(
    pages, tmp_path, kind, pictures, curves, boards, arrows
):
    dom, asked = browse(pages[kind], tmp_path)
    assert asked == []
    assert len(re.findall(r'<figure class="picture">', dom)) == pictures
    drawn = re.findall(r'id="[\w-]+-curve-\d+">\s*(?:<defs>\s*)?<path[^>]* d="([^"]+)"', dom)
    assert len(drawn) == curves and all(len(path) > 10 for path in drawn)
    assert len(re.findall(r'<figure class="board"><svg', dom)) == boards
    assert len(re.findall(r'<line[^>]*class="arrow"', dom)) == arrows


def test_what_a_page_would_fetch_is_noticed(pages, tmp_path):
    """The page without its policy, and with a picture from elsewhere; and that the policy forbids it."""
    text = pages["runs"].read_text().replace("</main>", '<img src="http://127.0.0.1:9/x.png"></main>')
    guarded, open_to_all = tmp_path / "guarded.html", tmp_path / "open.html"
    guarded.write_text(text)
    open_to_all.write_text(without_policy(text))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert browse(guarded, tmp_path / "a")[1] == []
    assert browse(open_to_all, tmp_path / "b")[1] == ["http://127.0.0.1:9/x.png"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_phone_shows_it_whole_and_legibly(pages, tmp_path, kind):
    """Nothing is wider than 400 pixels, no letter of text or of a picture is tiny, no table is squeezed."""
    measured = escape(without_policy(pages[kind].read_text()).replace("</body>", f"{MEASURE}</body>"))
    page = tmp_path / "framed.html"  # as no window is narrower than 500
    page.write_text(f'<title></title><iframe width="400" height="800" style="border: 0" srcdoc="{measured}">')
    dom, _ = browse(page, tmp_path)
    width, letters, words, row = json.loads(re.search("<title>(.*?)</title>", dom)[1])
    assert width == 400
    assert letters >= 10.5 and words >= 13
    assert row <= 3 * 30  # cells of at most three lines


ASK = """<script>
const asked = document.querySelector(".filter");
const shown = () => [...document.querySelectorAll("#completions tbody tr")].filter(row => !row.hidden).length;
const counts = [shown()];
for (const [name, value] of [["reward-from", "0.5"], ["words", "a4a5"], ["step-to", "19"]]) {
  asked.elements[name].value = value;
  asked.dispatchEvent(new Event("input"));
  counts.push(shown());
}
document.title = JSON.stringify([counts, document.querySelector(".filter output").textContent]);
</script>"""


def test_completions_are_filtered_by_what_is_asked_for(pages, tmp_path):
    """Three of six have a reward of 0.5 or more; all of those hold the words, none is of an earlier step."""
    page = tmp_path / "asked.html"
    page.write_text(without_policy(pages["run"].read_text()).replace("</body>", f"{ASK}</body>"))
    dom, _ = browse(page, tmp_path)
    counts, said = json.loads(re.search("<title>(.*?)</title>", dom)[1])
    assert counts == [6, 3, 3, 0] and said == "0 of 6"


def test_the_pages_own_script_runs_under_its_policy(pages, tmp_path):
    assert re.search(r"<output>6 of 6</output>", browse(pages["run"], tmp_path)[0])


def without_policy(text: str) -> str:
    left = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    assert left != text
    return left
