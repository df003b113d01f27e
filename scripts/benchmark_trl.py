"""TRL's GRPO trainer, and ours of the same name that stands on it. Needs trl (pip install -e '.[trl]').

python scripts/benchmark_trl.py equal             the same steps, however they are split: 384 runs in float64
python scripts/benchmark_trl.py limits            under limits on memory that stock TRL dies of
python scripts/benchmark_trl.py race              seconds a step with as many rows at once, in turns
python scripts/benchmark_trl.py own-tests FILE    TRL's tests/test_grpo_trainer.py, with theirs and with ours
"""

import contextlib
import io
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median

import trl
import tyro
from benchmarks.trl_runs import Outcome, Run, outcome, perform
from benchmarks.verdicts import conclude
from rich import box
from rich.table import Table

from grpo.commands.screen import screen


def equal(every: int = 1) -> int:
    """Every loss, level, KL, accumulation, number of iterations, and three sizes of parts. Ten minutes.

    Args:
        every: One of so many cases only; an odd number leaves none of these out.
    """
    from benchmarks.trl_cases import GROUP, Ours, Stock, all_cases, difference, rows_at_once, run

    worst, missed, compared = (0.0, 0.0), [], 0
    for case in all_cases()[::every]:
        with contextlib.redirect_stdout(io.StringIO()):
            stock = run(Stock, case)
            for rows in (GROUP, 3 * GROUP, GROUP // 2):
                found = difference(stock, run(Ours, case, prepare=rows_at_once(rows)))
                worst = max(worst[0], found[0]), max(worst[1], found[1])
                missed += [f"{case}, {rows} rows: {found}"] * (max(found) > 1e-10)
                compared += 1
    print(
        f"TRL {trl.__version__}: {compared - len(missed)} of {compared} within 1e-10; "
        f"at most {worst[0]:.1e} between parameters, {worst[1]:.1e} between metrics"
    )
    print("\n".join(missed))
    return int(bool(missed))


def limits(batch: int = 128, tokens: int = 32, steps: int = 4, quick: bool = False) -> int:
    """A GPT-2 of 10 M parameters. About a quarter of an hour on two cores.

    Args:
        batch: Completions of a step.
        tokens: Of each; in the runs that grow an eighth of it at first.
        steps: Of each run.
        quick: Two steps of half as many, with a quarter of the tokens, under one limit.
    """
    limit_mb = 2500
    if quick:
        batch, tokens, steps, limit_mb = batch // 2, tokens // 4, 2, 700
    table = _table(
        "limit, MB", "trainer", "rows at once", "steps done", "s a step", "peak, MB", "what it said"
    )
    tight = {"batch": batch, "tokens": tokens, "steps": steps, "limit_mb": limit_mb}
    later = {**tight, "limit_mb": 8 * limit_mb // 5, "tokens": 2 * tokens, "growing": True}
    runs = {
        "stock": Run("stock", **tight),
        "stock, a quarter at once by hand": Run("stock", **tight, accumulation=4),
        "ours": Run("ours", **tight),
    }
    if not quick:
        runs |= {
            "stock, completions grow": Run("stock", **later),
            "ours, completions grow": Run("ours", **later),
        }
    verdicts = {}
    for name, run in runs.items():
        done = outcome(run)
        if name.startswith("ours"):
            verdicts[f"{name}: all steps are done"] = done.done == steps
        elif run.accumulation == 1:
            verdicts[f"{name}: runs out of memory"] = done.done < steps
        table.add_row(
            str(run.limit_mb), name, ", ".join(map(str, done.rows)), f"{done.done} of {run.steps}",
            _step_s(done), f"{done.peak_mb:.0f}", done.said[:60],
        )  # fmt: skip
    screen(width=130).print(table)
    return conclude(verdicts, screen(width=130))


def race(batch: int = 32, tokens: int = 32, steps: int = 5, repeats: int = 3) -> int:
    """Both with all rows at once, and ours as it plans, no limit. About a quarter of an hour on two cores.

    Args:
        batch: Completions of a step.
        tokens: Of each.
        steps: Of each run; the first is left out.
        repeats: Runs of each, in turns.
    """
    kinds = {
        "stock": Run("stock", batch, tokens, steps),
        "ours, all at once": Run("ours", batch, tokens, steps, fixed=True),
        "ours": Run("ours", batch, tokens, steps),
    }
    done: dict[str, list[Outcome]] = {name: [] for name in kinds}
    for _ in range(repeats):
        for name, run in kinds.items():
            done[name].append(outcome(run))
    table = _table("trainer", "s a step", "of stock's", "peak, MB")
    seconds = {name: median(s for each in runs for s in each.steps_s[1:]) for name, runs in done.items()}
    for name, runs in done.items():
        table.add_row(
            name, f"{seconds[name]:.2f}", f"{seconds[name] / seconds['stock']:.2f}",
            f"{median(each.peak_mb for each in runs):.0f}",
        )  # fmt: skip
    screen(width=130).print(table)
    ratios = {name: seconds[name] / seconds["stock"] for name in kinds if name != "stock"}
    verdicts = {
        f"{name}: {ratio:.2f} of stock's (at most 1.3)": ratio <= 1.3 for name, ratio in ratios.items()
    }
    return conclude(verdicts, screen(width=130))


def own_tests(file: Path, only: str = "") -> int:
    """Run TRL's tests with their models made up. About ten minutes on two cores, each time.

    Args:
        file: tests/test_grpo_trainer.py in a copy of TRL's repository, of the version that is installed.
        only: What pytest's -k takes.
    """
    from benchmarks.trl_own_tests import make_all, outcomes

    folder = Path(tempfile.mkdtemp())
    make_all(folder)
    stock, ours = (outcomes(file.resolve(), folder, ours=swapped, only=only) for swapped in (False, True))
    for name, found in (("theirs", stock), ("ours", ours)):
        counts = sorted(Counter(found.values()).items())
        print(f"{name}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts))
    changed = [name for name in sorted(stock) if stock[name] != ours.get(name)]
    for name in changed:
        print(f"  {stock[name]} -> {ours.get(name)}: {name}")
    print(f"logs are in {folder}")
    return int(bool(changed) or not stock)


def one(run: tyro.conf.OmitArgPrefixes[Run]) -> int:
    """A run in this process, for the others."""
    perform(run)
    return 0


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading)
    return table


def _step_s(done: Outcome) -> str:
    return f"{median(done.steps_s[1:] or done.steps_s):.1f}" if done.steps_s else ""


if __name__ == "__main__":
    sys.exit(
        tyro.extras.subcommand_cli_from_dict(
            {"equal": equal, "limits": limits, "race": race, "own-tests": own_tests, "one": one}
        )
    )
