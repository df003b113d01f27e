"""A model as an engine for chess programs: `python scripts/play.py --model runs/NAME`."""

from grpo.commands import run

if __name__ == "__main__":
    raise SystemExit(run("uci"))
