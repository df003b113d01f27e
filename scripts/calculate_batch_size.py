"""The largest batch for a card that is not there: `python scripts/calculate_batch_size.py --gpu h100`."""

from grpo.commands import run

if __name__ == "__main__":
    raise SystemExit(run("calculate"))
