"""The installed command: what it lists, and that it does what the repository's files do."""

import importlib
import shutil
import tomllib
import zipfile

import pytest
from commands import ROOT
from setuptools import build_meta

from grpo import commands
from grpo.environment import typed

FILES = {
    "train": "train_lean.py", "monitor": "monitor_memory.py", "evaluate": "scripts/evaluate.py",
    "find-max": "scripts/find_max_batch_size.py", "calculate": "scripts/calculate_batch_size.py",
    "sweep": "scripts/sweep_batch_sizes.py", "report": "scripts/report.py",
    "check": "scripts/check_performance.py",
    "uci": "scripts/play.py", "match": "scripts/match.py",
}  # fmt: skip


def test_every_command_has_a_module_and_a_file_of_the_repository():
    assert set(FILES) == set(commands.COMMANDS)
    for name, file in FILES.items():
        assert f'run("{name}")' in (ROOT / file).read_text()
        assert callable(importlib.import_module(f"grpo.commands.{name.replace('-', '_')}").main)


def test_the_overview_is_a_screen_and_names_all(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["grpo-lean", "--help"])
    assert commands.main() == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 24 and max(map(len, text.splitlines())) < 100
    assert all(f"  {name} " in text for name in FILES)


@pytest.mark.parametrize(("words", "said"), [([], "usage: grpo-lean"), (["trian"], "'trian' is no command")])
def test_what_is_no_command_is_refused(monkeypatch, capsys, words, said):
    monkeypatch.setattr("sys.argv", ["grpo-lean", *words])
    assert commands.main() == commands.WRONG_USAGE
    assert said in "".join(capsys.readouterr())


def test_a_command_has_the_words_after_it_and_is_called_as_typed(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["/some/where/grpo-lean", "calculate", "--gpu", "h1000"])
    assert commands.main() == 2
    assert "no card known" in "".join(capsys.readouterr())
    assert typed("train") == "grpo-lean train" and typed("report") == "grpo-lean report"
    monkeypatch.setattr("sys.argv", ["train_lean.py"])
    assert typed("train") == "python train_lean.py"


def test_what_is_installed_holds_all_that_it_needs(tmp_path, monkeypatch):
    """Modules, the bundled model and its positions, the report's template; no benchmarks, no tests."""
    for folder in ("grpo", "rewards"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tmp_path)
    monkeypatch.chdir(tmp_path)
    name = build_meta.build_wheel(str(tmp_path))
    with zipfile.ZipFile(tmp_path / name) as wheel:
        inside = set(wheel.namelist())
        entry = next(each for each in inside if each.endswith("entry_points.txt"))
        assert "grpo-lean = grpo.commands:main" in wheel.read(entry).decode()
    for path in [*(ROOT / "grpo").rglob("*"), *(ROOT / "rewards").rglob("*.py")]:
        if path.is_file() and path.suffix != ".pyc":
            assert str(path.relative_to(ROOT)) in inside
    assert {each.split("/")[0] for each in inside} <= {
        "grpo",
        "rewards",
        name.rsplit("-", 3)[0] + ".dist-info",
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"grpo-lean": "grpo.commands:main"}
