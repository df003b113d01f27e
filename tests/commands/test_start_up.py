"""Commands read their flags before they load what takes seconds, and load no more than they need."""

import os
import shlex
import subprocess
import sys
import threading

import pytest
from commands import ENVIRONMENT, ROOT

from grpo import environment
from grpo.environment import NO_THREAD_CACHE, _glibc_version

LARGE = {"torch", "transformers", "accelerate", "scipy", "matplotlib"}


def imported_by(*words: str) -> tuple[set[str], str]:
    """Modules that `python words` imports, and what it says. It ends by itself, refusing something."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *words], cwd=ROOT,
        env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    lines = done.stderr.splitlines()
    assert done.returncode != 0, done.stderr
    times = [line for line in lines if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in times}, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train_lean.py --stps 3", "--steps"), ("train_lean.py --memory-limit 24", "no size"),
        ("train_lean.py --temperature 0", "temperature is 0"), ("train_lean.py --clip-range 2", "between 0"),
        ("train_lean.py --lora-alpha 8", "lora_rank is 0"), ("monitor_memory.py 20 63", "batch_size is 63"),
        ("scripts/evaluate.py auto --rows 0", "--rows is 0"),
        ("scripts/evaluate.py auto --max-new-tokens 0", "max_new_tokens is 0"),
        ("scripts/find_max_batch_size.py --group-size 1", "group_size is 1"),
        ("scripts/calculate_batch_size.py --gpu h1000", "no card known"),
        ("scripts/check_performance.py --steps 0", "steps is 0"),
        ("scripts/sweep_batch_sizes.py --arch gpt2 --heads 3", "not a multiple of 3 heads"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_refused_before_torch_is_loaded(words, said):
    modules, text = imported_by(*words.split())
    assert said in text and "grpo.config.reading" in modules
    assert not modules & LARGE


def test_a_run_loads_nothing_large_besides_torch_and_transformers():
    code = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel
before = set(sys.modules)
import grpo.run.setup, grpo.trainer
print(*set(sys.modules) - before)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=400)
    packages = {name.partition(".")[0] for name in done.stdout.split()}
    assert "grpo" in packages and not packages & LARGE, done.stderr


def test_the_help_can_be_printed_where_only_ascii_can():
    done = subprocess.run(
        [sys.executable, "train_lean.py", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60,
        env={**os.environ, **ENVIRONMENT, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--batch-size" in done.stdout and done.stdout.isascii()


def test_a_run_needs_nobody_to_talk_to(quick_flags, tmp_path):
    """With its errors closed, as a service has them; ~ behind = is the home of whom it runs for."""
    flags = [*quick_flags, "--steps", 1]
    typed = shlex.join([sys.executable, str(ROOT / "train_lean.py"), *map(str, flags), "--name", "a"])
    done = subprocess.run(
        ["sh", "-c", f"exec {typed} --runs-dir=~/mine 2>&-"], cwd=tmp_path, timeout=240, text=True,
        env={**os.environ, **ENVIRONMENT, "HOME": str(tmp_path)}, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert done.returncode == 0 and (tmp_path / "mine/a/model").is_dir()
    assert not (tmp_path / "~").exists()


RESTARTING = """
import os, sys
from grpo.environment import restart_without_thread_cache
restart_without_thread_cache()
restart_without_thread_cache()  # once is enough
print(os.getpid(), os.environ.get("GLIBC_TUNABLES"), sys.flags.optimize, *sys.argv[1:])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
@pytest.mark.parametrize(
    ("of_user", "tunables"),
    [
        ({}, NO_THREAD_CACHE), ({"MALLOC_ARENA_MAX": "2"}, "None"),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, "glibc.malloc.arena_max=2"),
    ],
)  # fmt: skip
def test_a_program_starts_again_as_it_was_unless_the_user_tunes_malloc(of_user, tunables, tmp_path):
    if (version := _glibc_version()) is None or version >= (2, 38):
        pytest.skip("this C library does without")
    script = tmp_path / "script.py"
    script.write_text(RESTARTING)
    free = {name: value for name, value in os.environ.items() if not name.startswith(("GLIBC", "MALLOC"))}
    process = subprocess.Popen(
        [sys.executable, "-O", script, "--name", "two words"], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env={**free, **of_user, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    said, _ = process.communicate(timeout=60)
    assert said.split() == [str(process.pid), tunables, "1", "--name", "two", "words"]


ON_WINDOWS = """
import sys
sys.platform = "win32"
sys.modules["resource"] = sys.modules["fcntl"] = None  # which are not there
sys.argv = ["train_lean.py", "--steps", "1"]
from grpo.commands import run
raise SystemExit(run("train"))
"""


def test_windows_by_itself_is_refused_in_one_sentence():
    done = subprocess.run([sys.executable, "-c", ON_WINDOWS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error Windows by itself is not supported: run this in WSL2 there, or on Linux or macOS."
    ]


@pytest.mark.parametrize(
    ("kernel", "of_user", "grows"),
    [
        ("6.1.0-18-amd64", {}, True), ("5.15.167.4-microsoft-standard-WSL2", {}, False),
        ("5.15.167.4-microsoft-standard-WSL2", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
        ("6.1.0-18-amd64", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, False),
    ],
)  # fmt: skip
def test_segments_grow_except_in_windows_subsystem(kernel, of_user, grows, tmp_path, monkeypatch):
    release = tmp_path / "osrelease"
    release.write_text(kernel)
    monkeypatch.setattr(environment, "KERNEL_RELEASE", release)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in of_user.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(environment, "keep_freed", lambda: None)
    stack = threading.stack_size()
    environment.set_library_defaults()
    threading.stack_size(stack)
    assert environment.grows_segments() is grows
