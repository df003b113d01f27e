"""What the README tells people to type, and what it says of the code."""

import re
import subprocess
import sys

import pytest
from commands import ROOT, run

README = (ROOT / "README.md").read_text()
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


def test_the_example_of_an_own_task_runs(tmp_path):
    example = README[README.index("<!-- example -->") : README.index("<!-- end of example -->")]
    blocks = dict(re.findall(r"```(\w+)\n(.*?)```", example, re.DOTALL))
    (tmp_path / "my_rewards.py").write_text(blocks["python"])
    (tmp_path / "my_prompts.jsonl").write_text(blocks["json"])
    command = blocks["sh"].replace("\\\n", " ").split()
    assert command[:2] == ["python", "train_lean.py"]
    done = run(*command[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step 2 - reward" in done.stderr


def test_the_example_of_memory_in_an_own_loop_runs():
    page = (ROOT / "docs" / "memory.md").read_text()
    example = page[page.index("<!-- memory example -->") : page.index("<!-- end of memory example -->")]
    code = re.search(r"```python\n(.*?)```", example, re.DOTALL)[1]
    assert "import grpo" not in code.replace("from grpo.memory", "") and "from grpo.memory import" in code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+ rows at once\n", done.stdout)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_pictures_lead_somewhere(page):
    links = re.findall(r"\]\(([^)]+)\)", page.read_text())
    near = [link for link in links if "://" not in link]
    lost = []
    for link in near:
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            lost.append(link)
    assert not lost


def test_every_picture_is_shown():
    shown = {
        (page.parent / name).resolve()
        for page in PAGES
        for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text())
    }
    pictures = (ROOT / "docs" / "pictures").iterdir()
    assert {path.resolve() for path in pictures} == shown


def anchors(page):
    """What GitHub makes of a page's headings: lower case, without punctuation, a hyphen for a space."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_readme_is_read_in_five_minutes():
    assert len(README.splitlines()) <= 220


def test_files_that_are_named_are_there():
    named = {
        (page.name, path)
        for page in PAGES
        for path in re.findall(r"`((?:grpo|rewards|scripts|tests|docs)/[\w./-]+)`", page.read_text())
    }
    assert len(named) > 12
    assert not [path for _, path in named if not (ROOT / path).exists()]
