"""The wheel, installed where nothing of the repository is: what it holds, and that it trains."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from commands import ROOT


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A Python of its own, which finds the libraries of this one, and the wheel in it."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    for name in ("grpo", "rewards"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", *offline, "--wheel-dir", folder, source], check=True)
    shutil.rmtree(source)
    venv.create(folder / "home", with_pip=False)
    (libraries,) = (folder / "home").glob("lib/python*/site-packages")
    # Read as a path, so that what is installed here as an editable copy of the repository is not found.
    (libraries / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (wheel,) = folder.glob("grpo_lean-*.whl")
    python = folder / "home" / "bin" / "python"
    subprocess.run([python, *pip[1:], "install", "--no-deps", "--no-index", "--quiet", wheel], check=True)
    return folder / "home"


def typed(home: Path, cwd: Path, *words: object) -> str:
    """Returns what a command of the installed copy prints; it ends with 0."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "HF_HUB_OFFLINE": "1"
    }
    command = [str(home / "bin" / str(words[0])), *map(str, words[1:])]
    done = subprocess.run(command, cwd=cwd, env=own, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_all_that_is_no_code_is_installed_and_the_code_is_not_the_repositorys(home, tmp_path):
    found = Path(typed(home, tmp_path, "python", "-c", "import grpo; print(grpo.__path__[0])").strip())
    assert found.is_relative_to(home)
    for folder in ("grpo", "rewards"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                copy = found.parent / path.relative_to(ROOT)
                assert copy.read_bytes() == path.read_bytes(), copy


def test_it_plans_trains_goes_on_and_reports_in_an_empty_folder(home, tmp_path):
    """With the bundled model, positions and settings, and a report of the bundled template."""
    little = ["--batch-size", 16, "--max-new-tokens", 8, "--eval-interval", 0, "--engine", "off"]
    assert "rows at once" in typed(home, tmp_path, "grpo-lean", "train", "--dry-run", *little)
    assert not list(tmp_path.glob("runs/*/model"))
    typed(home, tmp_path, "grpo-lean", "train", *little, "--steps", 1, "--name", "a")
    said = typed(home, tmp_path, "grpo-lean", "train", "--resume", "runs/a", "--steps", 2)
    assert "done after 2 steps" in " ".join(said.split())
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "runs/a/metrics.jsonl").read_text().splitlines()
    ]
    assert sorted(set(steps)) == [1, 2]
    typed(home, tmp_path, "grpo-lean", "report", "runs/a")
    assert "</svg>" in (tmp_path / "runs/a/report.html").read_text()
