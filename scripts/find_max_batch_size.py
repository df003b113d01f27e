"""The largest batch that fits this device, by real training steps."""

from grpo.commands import run

if __name__ == "__main__":
    raise SystemExit(run("find-max"))
