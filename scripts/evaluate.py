"""Held-out quality of a model or a run: `python scripts/evaluate.py runs/NAME`."""

from grpo.commands import run

if __name__ == "__main__":
    raise SystemExit(run("evaluate"))
