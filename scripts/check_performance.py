"""What this machine reaches in training: `python scripts/check_performance.py`."""

from grpo.commands import run

if __name__ == "__main__":
    raise SystemExit(run("check"))
