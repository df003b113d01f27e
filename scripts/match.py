"""Games of a model against an opponent: `python scripts/match.py runs/NAME --against rook-tiny`."""

from grpo.commands import run

if __name__ == "__main__":
    raise SystemExit(run("match"))
