"""One model at several batch sizes: `python scripts/sweep_batch_sizes.py --batch-sizes 8 32`."""

from grpo.commands import run

if __name__ == "__main__":
    raise SystemExit(run("sweep"))
