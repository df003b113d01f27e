"""The proof of a release, part by part: `make proof`. Half an hour on two cores.

Benchmarks at their smallest, rates and accuracy, faults and fuzzing, a browser, training that improves, the
installed wheel, several processes, a card where there is one, and faults made in the source.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

ROOT = Path(__file__).parents[1]
SHOWN = 15
"""Last lines of a part that failed."""


@dataclass(frozen=True)
class ProofPart:
    """One command that ends with 0 if it holds. minutes: its limit, some five times what it takes alone."""

    name: str
    minutes: float
    command: str
    proves: str
    needs: Sequence[str] = ()
    """The thing that it needs, and programs of which one shows that it is there."""

    def words(self, folder: Path) -> list[str]:
        """The words of the command, in which a script or a module stands for what starts it."""
        first, *rest = (word.format(folder=folder) for word in shlex.split(self.command))
        if first.endswith(".py"):
            return [sys.executable, f"scripts/{first}", *rest]
        return [sys.executable, "-m", first, *rest] if first != "sh" else [first, *rest]

    @property
    def lack(self) -> str:
        """Why it is skipped here, if it is."""
        path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/games"])
        there = any(shutil.which(program, path=path) for program in self.needs[1:])
        return f"no {self.needs[0]}" if self.needs and not there else ""


CARD = "card", "nvidia-smi"
CHROMIUM = "Chromium", "chromium", "chromium-browser"
TOGETHER = (
    ProofPart("accuracy", 8, "benchmark_memory.py --quick", "tensors add what was said before"),
    ProofPart("faults", 8, "pytest tests/proof/faults_on_the_disk.py", "full disks and SIGKILL lose nothing"),
    ProofPart("fuzz", 10, "pytest tests/proof/bad_input.py", "whatever comes in, no traceback"),
    ProofPart("leaks", 10, "pytest tests/proof/leak_rates.py", "leaks are found, and not where none is"),
    ProofPart("trl", 15, "pytest tests/proof/grid_of_trl.py", "steps are TRL's, however they are split"),
    ProofPart("trl-tests", 5, "pytest tests/proof/own_tests_of_trl.py", "tests of its kind run with ours"),
    ProofPart("chat", 10, "pytest tests/proof/real_chat_model.py", "a real chat model answers as it should"),
    ProofPart(
        "models",
        60,
        "models_page.py --page {folder}/models.md --at-once 1",
        "a step of every kind that transformers lists",
    ),
    ProofPart("uci", 5, "pytest tests/proof/uci_games.py", "games by the clock, and nonsense"),
    ProofPart(
        "learning-curve",
        5,
        "learning_curve.py --output {folder} --seeds 1 --steps 1 --batch-size 16 --heldout 4 --minutes 0.03",
        "at learning rate 0 nothing moves",
    ),
    ProofPart(
        "card-small", 8, "sh scripts/gpu_check.sh --small --output {folder}/small.json", "its parts run"
    ),
    ProofPart("documented", 8, "pytest tests/proof/as_documented.py", "accelerate starts one run"),
    ProofPart("installed", 8, "pytest tests/proof/installed.py", "the wheel trains anywhere"),
    ProofPart("browser", 8, "pytest tests/proof/report_in_browser.py", "reports in Chromium", CHROMIUM),
    ProofPart(
        "examples",
        15,
        "pytest -p tests.proof.more_examples --hypothesis-profile=proof tests",
        "properties, by 20 times as many new examples",
    ),
    ProofPart(
        "tokens",
        5,
        "pytest tests/invariances/test_sampled.py -k few -s --hypothesis-profile=proof",
        "of 10,000 tokens in fp32 and bf16 few depend on rows",
    ),
)
"""That may share the machine."""
ALONE = (
    ProofPart("race", 8, "benchmark.py --only shape --rounds 1 --best", "no slower than TRL, in less memory"),
    ProofPart(
        "overhead",
        5,
        "pytest tests/proof/memory_at_work.py -k percent",
        "watching memory takes 1 % of a step",
    ),
    ProofPart(
        "limits",
        15,
        "pytest tests/proof/memory_at_work.py -k limit",
        "the least limit that is named is enough, and twice the need costs no time",
    ),
    ProofPart("improves", 30, "demo.py --steps 20 --minutes 30 --must-improve", "GRPO improves rook-tiny"),
    ProofPart(
        "card", 8, "sh scripts/gpu_check.sh --quick --output {folder}/card.json", "a card's speed", CARD
    ),
    ProofPart(
        "mutants",
        30,
        "pytest -n 2 --dist=load tests/proof/mutants.py",
        "faults made in the source are noticed by the tests",
    ),
)
"""That compare speeds, or keep all cores busy by themselves."""


_RUNNING: set[subprocess.Popen[bytes]] = set()


def run_to_end(command: Sequence[str], printed: Path, timeout_s: float, **options: Any) -> int | None:
    """The exit status, None if it had to be ended; what is left of its processes is killed.

    printed: a file for what it prints. options: as of Popen.
    """
    with printed.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, **options
        )
        _RUNNING.add(process)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _RUNNING.discard(process)


def main(
    only: tuple[str, ...] = (),
    listed: Annotated[bool, tyro.conf.arg(name="list")] = False,
    folder: Path = ROOT / "build" / "proof",
    at_once: int = 2,
) -> int:
    """Run the parts, first those that may share the machine; 1 if one failed.

    Args:
        only: Names of parts.
        listed: Show what each proves, and how, and run nothing.
        folder: For what they say and write.
        at_once: Parts that share the machine, with a thread each.
    """
    if unknown := sorted({*only} - {part.name for part in TOGETHER + ALONE}):
        sys.exit(f"error: no part is called {', '.join(unknown)}; --list shows them.")
    folder, chosen = folder.resolve(), [part for part in TOGETHER + ALONE if part.name in only or not only]
    if listed:
        for part in chosen:
            print(f"{part.name:15} {part.proves}\n{'':15} {shlex.join(part.words(folder / part.name))}")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    begun, pool = time.monotonic(), ThreadPoolExecutor(at_once)
    try:
        together = [part for part in chosen if part in TOGETHER]
        verdicts = [*pool.map(lambda part: run(part, folder, OMP_NUM_THREADS="1"), together)]
        verdicts += [run(part, folder) for part in chosen if part in ALONE]
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in [*_RUNNING]:
            _end(process)
        return 130
    counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in ("passed", "failed")]
    if reasons := [verdict for verdict in verdicts if verdict not in ("passed", "failed")]:
        counts.append(f"{len(reasons)} skipped ({', '.join(reasons)})")
    print(f"proof: {', '.join(counts)} in {(time.monotonic() - begun) / 60:.0f} min")
    return int("failed" in verdicts)


def run(part: ProofPart, folder: Path, **environment: str) -> str:
    """passed, failed, or why it is skipped; printed, of one that failed with the last that it printed."""
    if part.lack:
        print(f"skipped  {part.name:15} {part.proves}: {part.lack}", flush=True)
        return part.lack
    begun, file = time.monotonic(), folder / f"{part.name}.txt"
    shutil.rmtree(folder / part.name, ignore_errors=True)
    (folder / part.name).mkdir()
    environment = {**os.environ, "PYTHON": sys.executable, **environment}
    words = part.words(folder / part.name)
    status = run_to_end(words, file, 60 * part.minutes, cwd=ROOT, env=environment)
    verdict = "failed" if status != 0 else "passed"
    lines = [f"{verdict:8} {part.name:15} {time.monotonic() - begun:5.0f} s  {part.proves}"]
    if status != 0:
        failure = f"no end within {part.minutes:g} minutes" if status is None else f"exit status {status}"
        last = file.read_text(errors="replace").splitlines()[-SHOWN:]
        lines += [f"    {line}" for line in [*last, f"{failure}: {file}"]]
    print("\n".join(lines), flush=True)
    return verdict


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(tyro.cli(main))
