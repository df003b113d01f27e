"""The installed command: what it lists and holds, what it loads and when, and how it starts."""

import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
import zipfile

import pytest
from commands import ENVIRONMENT, ROOT
from setuptools import build_meta

from grpo import commands, environment
from grpo.environment import command_hint

FILES = {"train": "train_lean.py", "monitor": "monitor_memory.py"}
LARGE = {"torch", "transformers", "accelerate", "scipy", "matplotlib"}


def fresh(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A Python that has just been started."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, **variables},
        capture_output=True,
        text=True,
        timeout=400,
    )


def test_every_command_has_a_module_and_two_have_a_file_of_the_repository():
    for name, file in FILES.items():
        assert f'run("{name}")' in (ROOT / file).read_text()
    for command in commands.COMMANDS.values():
        for module, name in (place.split(":") for place in (command.settings, command.action)):
            assert callable(getattr(importlib.import_module(module), name))


def test_the_overview_is_a_screen_that_names_all_and_a_command_has_the_words_after_it(monkeypatch, capsys):
    def ended(*words: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["/some/where/grpo-lean", *words])
        return commands.main(), "".join(capsys.readouterr())

    status, text = ended("--help")
    assert status == 0 and all(f"  {name} " in text for name in commands.COMMANDS)
    assert len(text.splitlines()) < 24 and max(map(len, text.splitlines())) < 100
    for line, said in (
        ("", "usage: grpo-lean"),
        ("trian", "'trian' is no command"),
        ("calculate --gpu h1000", "no card known"),
    ):
        status, text = ended(*line.split())
        assert status == commands.WRONG_USAGE and said in text
    assert command_hint("train") == "grpo-lean train"
    monkeypatch.setattr("sys.argv", ["train_lean.py"])
    assert command_hint("train") == "python train_lean.py"


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
        (entry,) = (each for each in inside if each.endswith("entry_points.txt"))
        assert "grpo-lean = grpo.commands:main" in wheel.read(entry).decode()
    for path in [*(ROOT / "grpo").rglob("*"), *(ROOT / "rewards").rglob("*.py")]:
        if path.is_file() and path.suffix != ".pyc":
            assert str(path.relative_to(ROOT)) in inside
    of_itself = name.rsplit("-", 3)[0] + ".dist-info"
    assert {each.split("/")[0] for each in inside} <= {"grpo", "rewards", of_itself}


ONE_AFTER_ANOTHER = """
import io, json, runpy, sys
from contextlib import redirect_stderr, redirect_stdout
found = []
for line in json.loads(sys.argv[1]):
    sys.argv, said, status = line.split(), io.StringIO(), None
    with redirect_stdout(said), redirect_stderr(said):
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as ended:
            status = ended.code
    found.append([line, status, said.getvalue(), list(sys.modules)])
print(json.dumps(found))
"""
WRONG = {
    "train_lean.py --stps 3": "--steps",
    "train_lean.py --memory-limit 24": "no size",
    "train_lean.py --prompts no.txt": "no file no.txt",
    "train_lean.py --reward polcy": "not known",
    "train_lean.py --lora-alpha 8": "lora_rank is 0",
    "monitor_memory.py 20 63": "batch_size is 63",
    "tests/grpo_lean.py evaluate auto --max-new-tokens 0": "max_new_tokens is 0",
    "tests/grpo_lean.py find-max --group-size 1": "group_size is 1",
    "tests/grpo_lean.py calculate --gpu h1000": "no card known",
    "tests/grpo_lean.py check --steps 0": "steps is 0",
    "tests/grpo_lean.py report nowhere": "nowhere is no folder",
    "tests/grpo_lean.py match a": "--against",
    "tests/grpo_lean.py uci --seed -1": "seed is -1",
    "tests/grpo_lean.py sweep --arch gpt2 --heads 3": "not a multiple of 3 heads",
}


def test_a_wrong_setting_is_refused_before_torch_is_loaded():
    """Tries each command, one after another in one Python."""
    done = fresh("-c", ONE_AFTER_ANOTHER, json.dumps(list(WRONG)))
    for line, status, said, modules in json.loads(done.stdout):
        assert status == 2 and WRONG[line] in said, said
        assert "grpo.config.reading" in modules and not LARGE & set(modules), line


A_RUN = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel
before = set(sys.modules)
from grpo.commands import run
status = run("train")
print(*{name.partition(".")[0] for name in set(sys.modules) - before})
sys.exit(status)
"""


def test_a_run_needs_nobody_to_talk_to_and_no_large_library_but_two(quick_flags, tmp_path):
    """With its errors closed, as a service has them; ~ behind = is the home of whom it runs for."""
    flags = [*quick_flags, "--steps", 1, "--trackers", "--name", "a"]
    line = shlex.join([sys.executable, "-c", A_RUN, *map(str, flags)])
    done = subprocess.run(
        ["sh", "-c", f"exec {line} --runs-dir=~/mine 2>&-"],
        cwd=tmp_path,
        timeout=240,
        text=True,
        env={**os.environ, **ENVIRONMENT, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    assert done.returncode == 0 and (tmp_path / "mine/a/model").is_dir() and not (tmp_path / "~").exists()
    packages = set(done.stdout.splitlines()[-1].split())
    assert "grpo" in packages and not packages & (LARGE - {"torch", "transformers"})


def test_the_help_can_be_printed_where_only_ascii_can():
    done = fresh("train_lean.py", "--help", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 0, done.stderr
    assert "--batch-size" in done.stdout and done.stdout.isascii()


def test_windows_and_too_small_an_address_space_are_refused_before_a_library_aborts(tmp_path):
    done = fresh("-c", ON_WINDOWS)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error Windows") and "WSL2" in done.stderr
    limited = f"ulimit -v 1000000; exec {sys.executable} {ROOT / 'train_lean.py'} --steps 1"
    done = subprocess.run(["bash", "-c", limited], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "(ulimit -v) is 0.95 GB" in done.stderr


ON_WINDOWS = """
import sys
sys.platform = "win32"
sys.modules["resource"] = sys.modules["fcntl"] = None  # which are not there
sys.argv = ["train_lean.py", "--steps", "1"]
from grpo.commands import run
raise SystemExit(run("train"))
"""


@pytest.mark.parametrize(
    ("kernel", "of_user", "grows"),
    [
        ("6.1.0-18-amd64", {}, True),
        ("5.15.167.4-microsoft-standard-WSL2", {}, False),
        ("5.15.167.4-microsoft-standard-WSL2", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
        ("6.1.0-18-amd64", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, False),
    ],
)
def test_segments_grow_except_in_windows_subsystem(kernel, of_user, grows, tmp_path, monkeypatch):
    (release := tmp_path / "osrelease").write_text(kernel)
    monkeypatch.setattr(environment, "KERNEL_RELEASE", release)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
        if name in of_user:
            monkeypatch.setenv(name, of_user[name])
    monkeypatch.setattr(environment, "keep_freed", lambda: None)
    stack = threading.stack_size()
    environment.set_library_defaults()
    threading.stack_size(stack)
    assert environment.grows_segments() is grows
