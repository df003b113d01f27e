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
   Math.max(...[...document.querySelectorAll("tr")].map(row => row.clientHeight))]);
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
        # 3 held out; 3, 2 and 1 of rewards; 1, 3, 3, 1, 1, 1 of the policy; 5 of time; 2 · 3 and 3 of memory
        pytest.param("run", 15, 3 + 6 + 10 + 5 + 9, 8, 5, id="run"),
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


def without_policy(text: str) -> str:
    left = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    assert left != text
    return left
