"""A sweep or a run as one page: `python scripts/report.py runs/NAME`."""

from grpo.commands import run

if __name__ == "__main__":
    raise SystemExit(run("report"))
