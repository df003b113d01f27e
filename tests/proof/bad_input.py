"""Bad settings, prompts, rewards, run folders and checkpoints, made up by Hypothesis.

Whatever comes in, a command ends well, or with a message of at most five lines and no traceback, in time.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from disk_calls import run_command
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from grpo.config import Config, to_plain

MOST_LINES, PATIENCE_S, _COLUMNS = 5, 60, 160

_TEXTS = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        ["[/x]", "[red]", "{}", "\x1b[31m", "\n", "../..", "~", "nan", "1e999", "9" * 5001, "\ud800"]
    ),
)
_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), _TEXTS, st.dates()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_TEXTS, inner, max_size=3)),
    max_leaves=6,
)
_NAMES = st.sampled_from(sorted(to_plain(Config())))
_CODE = st.sampled_from(
    """
10**400
[10**400] * n
'1' * n
['1'] * n
{i: 1.0 for i in range(n)}
[1.0] * (n + 1)
None
[float('nan')] * n
[float('inf')] * n
itertools.repeat(1.0)
(1 / 0 for _ in range(n))
prompts.clear() or completions.clear() or [1.0] * n
sys.exit(0)
sys.exit('bye')
[object()] * n
torch.set_grad_enabled(False) and None or [1.0] * n
[torch.rand(()) for _ in range(n)]
[None] * n
[random.random() for _ in range(n)]
torch.rand(n)
numpy.random.rand(n)
[1j] * n
[[1.0]] * n
Bad()
[Bad()] * n
b'1' * n
(_ for _ in ()).throw(GeneratorExit)
open('/nowhere')
f()
__import__('nothing')
[True] * n
set(range(n))
range(n)
[-0.0] * n
[1e308, -1e308] * n
""".strip().splitlines()
)
_REWARD = """
import itertools, random, sys
import numpy, torch

class Bad:
    def __float__(self): raise RuntimeError("no number")
    def __iter__(self): raise RuntimeError("no list")
    def __str__(self): raise RuntimeError("no text")
    __repr__ = __str__

def reward(prompts, completions, **columns):
    n = len(completions)
    return {code}
"""


@dataclass(frozen=True)
class Case:
    """Words of a command, and what made them bad."""

    words: Sequence[str]
    about: str


Make = Callable[[Path, "Samples", Any], Case]


@dataclass(frozen=True)
class Samples:
    """A run that stopped after two of its steps, and the flags of another."""

    run: Path
    flags: Sequence[str]

    def resumed(self, folder: Path) -> tuple[Path, list[str]]:
        """A copy to be damaged, and how it goes on."""
        copy = folder / "damaged"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.run, copy, symlinks=True)
        return copy, ["--resume", str(copy), "--steps", "3"]


def _bad_settings(folder: Path, samples: Samples, drawn: Any) -> Case:
    file = folder / "bad.yaml"
    file.write_text(yaml.dump(drawn), errors="surrogatepass")
    return Case([*samples.flags, "--steps", "1", "--config", str(file)], f"settings {drawn!r}")


def _bad_flag(folder: Path, samples: Samples, drawn: tuple[str, str]) -> Case:
    name, value = drawn
    clean = value.replace("\0", "").encode(errors="replace").decode()
    return Case([*samples.flags, "--steps", "1", f"--{name.replace('_', '-')}={clean}"], f"flag {drawn!r}")


def _bad_yaml(folder: Path, samples: Samples, drawn: bytes) -> Case:
    file = folder / "bad.yaml"
    file.write_bytes(drawn)
    return Case([*samples.flags, "--steps", "1", "--config", str(file)], f"a settings file of {drawn!r}")


def _bad_prompts(folder: Path, samples: Samples, drawn: tuple[str, list[Any]]) -> Case:
    kind, rows = drawn
    file = folder / f"bad.{kind}"
    lines = [row if isinstance(row, bytes) else json.dumps(row, default=str).encode() for row in rows]
    file.write_bytes(b"\n".join(lines))
    return Case([*samples.flags, "--steps", "1", "--prompts", str(file)], f"prompts {drawn!r}")


def _bad_reward(folder: Path, samples: Samples, drawn: str) -> Case:
    file = folder / "bad_reward.py"
    file.write_text(_REWARD.format(code=drawn))
    return Case(
        [*samples.flags, "--steps", "1", "--reward", f"{file}:reward"], f"a reward that returns {drawn}"
    )


def _bad_folder(folder: Path, samples: Samples, drawn: tuple[int, str, float, bytes]) -> Case:
    which, how, where, content = drawn
    copy, words = samples.resumed(folder)
    files = sorted(path for path in copy.rglob("*") if path.is_file())
    file = files[which % len(files)]
    data = file.read_bytes()
    place = int(where * len(data))
    if how == "directory":
        file.unlink()
        file.mkdir()
    elif how == "gone":
        file.unlink()
    else:
        changed = {"cut": data[:place], "other": content, "put in": data[:place] + content + data[place:]}
        file.write_bytes(changed[how])
    return Case(words, f"{file.relative_to(copy)} {how} at {place}, {content!r}")


_SETTINGS = st.dictionaries(st.one_of(_NAMES, _NAMES, _NAMES, _TEXTS), _VALUES, min_size=1, max_size=3)
_FLAG_VALUES = st.one_of(_TEXTS, st.integers().map(str), st.floats().map(str))
_YAML = [
    *(b"5: 1", b"~: 1", b"2026-01-01: 1", b"steps: 2026-13-45", b"steps: " + b"9" * 5001),
    *(b"[" * 3000 + b"]" * 3000, b"!!python/object/apply:os.system ['true']", b"a: &a [*a]", b"\xff\xfe"),
]
_ROWS = st.one_of(st.binary(max_size=40), _VALUES, _VALUES.map(lambda value: {"prompt": value}))
_FILES = st.sampled_from(["txt", "jsonl", "fen", "pgn", "parquet"])
_DAMAGES = st.sampled_from(["cut", "other", "put in", "directory", "gone"])
_CONTENTS = st.one_of(st.binary(max_size=20), st.sampled_from([b"null\n", b"{}\n", b"[]", b"\xff\n"]))

KINDS: Mapping[str, tuple[Make, st.SearchStrategy[Any], int]] = {
    "settings": (_bad_settings, _SETTINGS, 38),
    "flags": (_bad_flag, st.tuples(_NAMES, _FLAG_VALUES), 38),
    "settings files": (_bad_yaml, st.one_of(st.binary(max_size=60), st.sampled_from(_YAML)), 12),
    "prompts": (_bad_prompts, st.tuples(_FILES, st.lists(_ROWS, max_size=6)), 25),
    "rewards": (_bad_reward, _CODE, 37),
    "run folders": (
        _bad_folder,
        st.tuples(st.integers(0, 99), _DAMAGES, st.floats(0, 1), _CONTENTS),
        50,
    ),
}
"""How bad things of a kind are made, from what, and how many."""


@pytest.fixture(scope="module")
def samples(tmp_path_factory, command_of_seconds) -> Samples:
    torch.set_num_threads(1)  # a process with more could not be forked
    folder = tmp_path_factory.mktemp("bad")
    status, said = typed([*command_of_seconds, "--steps", "2", "--name", "sample"], folder)
    assert status == 0, said
    return Samples(folder / "runs" / "sample", command_of_seconds)


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_comes_in_the_command_ends_well_or_with_a_message(samples, kind, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", str(_COLUMNS))
    make, strategy, cases = KINDS[kind]
    folder, ended = samples.run.parents[1], Counter()

    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def check(drawn: Any) -> None:
        case = make(folder, samples, drawn)
        status, said = typed(case.words, folder)
        broken = what_is_broken(status, said)
        assert not broken, f"{case.about}: {broken}\n{said[-1500:]}"
        ended["well" if status == 0 else "with a message"] += 1
        for path in (folder / "runs").iterdir():
            if path != samples.run:
                shutil.rmtree(path, ignore_errors=True)

    check()
    with capsys.disabled():
        print(f"\n{kind}: {dict(ended)}")


def what_is_broken(status: int, said: str) -> str | None:
    """Which part of the rule a command that said this has broken, if any."""
    if "Traceback" in said:
        return "a traceback"
    if status < 0:
        return f"killed by signal {-status}, as after {PATIENCE_S} seconds"
    if status == 0:
        return None
    lines = said.rstrip().splitlines()
    starts = [at for at, line in enumerate(lines) if line.startswith("error") or "ERROR" in line[:20]]
    boxed = any("╭" in line for line in lines)  # of flags that are not known, which tyro says at length
    if not starts and not boxed:
        return f"status {status} without a message"
    if starts and not boxed and _screen_lines(lines[starts[-1] :]) > MOST_LINES:
        return "a long message"
    return None


def _screen_lines(lines: Sequence[str]) -> int:
    return sum(max(1, -(-len(line) // _COLUMNS)) for line in lines)


def typed(words: Sequence[str], folder: Path) -> tuple[int, str]:
    """How `train_lean.py` with these words ended, and what it said."""
    said = folder / "said.txt"
    said.unlink(missing_ok=True)
    status = run_command(words, said, folder, kill_after_s=PATIENCE_S)
    return status, said.read_text(errors="replace")
