"""Folders as a sweep and a training run leave them, written by hand for the tests of reports."""

import json
from pathlib import Path

GB = 2**30
SIZES, TOTAL, CONTEXT = (16, 32, 64, 128, 256, 512), 2_097_152, 128
START_S, EACH_S, COMPILE_S, SLOW_COMPILE_S = 0.02, 0.004, 2.0, 150.0
LOSSES = {16: 2.400, 32: 2.312, 64: 2.300, 128: 2.310, 256: 2.450}
FEN, NEXT_FEN = "8/8/R7/7p/P2K2k1/7r/8/8 w - - 0 56", "8/8/R7/P6p/3K2k1/7r/8/8 b - - 0 56"


def sweep_settings() -> dict:
    return {
        "objective": "lm",
        "unit": "tokens",
        "total": TOTAL,
        "batch_sizes": list(SIZES),
        "model": "gpt2 of 4 layers",
        "num_parameters": 3_500_000,
        "device_name": "two CPU cores",
        "precision": "fp32",
        "learning_rate": 3e-4,
        "base_batch_size": 32,
        "scale_lr": "none",
        "lr_schedule": "cosine",
        "min_lr_ratio": 0.1,
        "warmup_share": 0.05,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "context": CONTEXT,
        "memory_limit_bytes": None,
        "usable_bytes": 4 * GB,
        "compile": True,
        "tf32": False,
        "quality": {"name": "held-out loss", "better": "lower", "unit": "nats a token"},
        "seed": 0,
        "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
        "started": "2026-11-21T10:00:00",
        "settings": {"data": "bundled"},
    }


def windows(batch_size: int) -> list[float]:
    """Losses of held-out windows, 20 alike in turn 0.04 below and above the mean.

    Those of size 32 and 128 differ from size 64's by 0.05 less and 0.05 more than their means do.
    """
    apart = 0.05 if batch_size in (32, 128) else 0.0
    return [
        LOSSES[batch_size] + (0.04 if block % 2 else -0.04) + (apart if block < 5 else -apart)
        for block in range(10)
        for _ in range(20)
    ]


def write_size(sweep: Path, batch_size: int) -> None:
    """A row takes 9 MB of tensors, a twentieth more was predicted. Losses fall from 5.5 to the size's.

    An update costs START_S and EACH_S a row, the first what compiling takes besides, long of size 128. Size
    512 ran out of memory after an eighth of its updates.
    """
    folder = sweep / f"size-{batch_size:05d}"
    folder.mkdir()
    updates, end = TOTAL // CONTEXT // batch_size, LOSSES.get(batch_size, 2.45)
    failed = batch_size == 512
    lines: list[dict] = [{"step": 0, "eval_loss": 5.5}]
    for update in range(1, (updates // 8 if failed else updates) + 1):
        share = update / updates
        loss = end + (5.5 - end) * (1 - share) ** 2 / (1 + 30 * share)
        compile_s = SLOW_COMPILE_S if batch_size == 128 else COMPILE_S
        lines.append(
            {
                "step": update,
                "loss": loss - 0.05 * share,
                "learning_rate": 3e-4 * (1 - share),
                "step_time": START_S + EACH_S * batch_size + compile_s * (update == 1),
            }
        )
        if update % (updates // 8) == 0:
            lines.append({"step": update, "eval_loss": loss})
    added = batch_size * 9 * 2**20
    memory = [
        {
            "step": step,
            "phase": "learn",
            "rows": batch_size,
            "predicted_bytes": round(1.05 * added),
            "added_bytes": None if failed else added,
            "process_bytes": added + GB // 4,
            "retries": 0,
        }
        for step in (1, 2)
    ]
    ended = {"status": "ok", "message": ""}
    if failed:
        ended = {"status": "out of memory", "message": "DefaultCPUAllocator: can't allocate memory"}
    else:
        write_json(folder / "heldout.json", {"step": updates, "values": windows(batch_size)})
    write_json(folder / "task.json", {"learning_rate": 3e-4, "warmup_steps": round(0.05 * updates)})
    write_json(folder / "ended.json", ended)
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(folder / "memory.jsonl", memory)


def write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content))


def write_sweep(folder: Path, *, notes: str = "") -> Path:
    folder.mkdir(parents=True)
    write_json(folder / "sweep.json", sweep_settings())
    for batch_size in SIZES:
        write_size(folder, batch_size)
    if notes:
        (folder / "notes.md").write_text(notes)
    return folder


def write_lines(file: Path, records: list[dict]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def evaluation(step: int) -> dict:
    """The reward 0.6 at first, 0.005 more each step."""
    line = {"step": step}
    for name, value in (("reward", 0.6), ("policy/legal", 0.5), ("environment/nls", 0.7)):
        mean = value + 0.005 * step
        line |= {f"eval_{name}": mean, f"eval_{name}/low": mean - 0.04, f"eval_{name}/high": mean + 0.04}
    return line


def completion(step: int, text: str, *, prompt: str = f"P: {FEN}", reward: float = 0.5) -> dict:
    task = "environment" if prompt.startswith("A:") else "policy"
    return {
        "step": step,
        "row": 0,
        "prompt_id": "1",
        "prompt": prompt,
        "completion": text,
        "num_tokens": 40,
        "terminated": True,
        "rewards": {task: reward},
        "components": {f"{task}/format": 1.0},
        "advantage": 0.5,
    }


def write_run(folder: Path, **settings: object) -> Path:
    """20 steps. The reward grows by 0.01 a step from 0.5; evaluations at 0, 10 and 20.

    Completions: a legal move, an illegal one, no move; a right next position, a wrong one, none. Learning
    peaks highest at step 2, and was done again once at step 3.
    """
    folder.mkdir(parents=True)
    known = {
        "model": "rook-tiny",
        "steps": 20,
        "batch_size": 32,
        "group_size": 8,
        "learning_rate": 1e-5,
        "kl_coef": 0.02,
        "reward": ["policy", "environment"],
        "reward_weights": [],
    }
    write_json(folder / "config.yaml", known | settings)
    lines, memory = [evaluation(0)], []
    for step in range(1, 21):
        lines.append(
            {
                "step": step,
                "reward": 0.5 + 0.01 * step,
                "reward_std_within_groups": 0.1,
                "frac_reward_zero_std": 0.25,
                "rewards/policy/mean": 0.3 + 0.01 * step,
                "rewards/environment/mean": 0.8,
                "rewards/policy/best_move/mean": 0.1,
                "rewards/policy/format/mean": 0.9,
                "completions/mean_length": 50.0,
                "completions/max_length": 90.0,
                "completions/min_length": 30.0,
                "completions/clipped_ratio": 0.0,
                "clip_ratio/low_mean": 0.01,
                "clip_ratio/high_mean": 0.02,
                "clip_ratio/region_mean": 0.03,
                "kl": 0.002 * step,
                "grad_norm": 0.7,
                "entropy": 0.5,
                "skipped": 0.0,
                "learning_rate": 1e-5,
                "timing/sample_s": 1.0,
                "timing/score_s": 0.5,
                "timing/learn_s": 2.0,
                "timing/other_s": 0.5,
                "step_time": 4.0,
                "num_tokens": 2000 * step,
                "memory/peak_gb": 0.7,
            }
        )
        lines += [evaluation(step)] if step % 10 == 0 else []
        memory += [
            {
                "step": step,
                "phase": phase,
                "rows": 32,
                "predicted_bytes": GB,
                "added_bytes": round(GB * (1.25 if (phase, step) == ("learn", 2) else 0.8)),
                "process_bytes": 2 * GB,
                "retries": int((phase, step) == ("learn", 3)),
            }
            for phase in ("sample", "score", "learn")
        ]
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(folder / "memory.jsonl", memory)
    starts = {0: "train_lean.py --steps 10", 10: "train_lean.py --resume runs/run"}
    write_lines(
        folder / "starts.jsonl",
        [{"step": step, "host": "here", "commit": None, "command": words} for step, words in starts.items()],
    )
    moves = (
        (" M: a4a5 E: 0.3 B: a4a5", 1.0),
        (" M: d4g8 E: 0.3 B: d4g8", 0.2),
        (" M: <script>alert(1)</script>", 0.0),
    )
    states = (
        (f"{NEXT_FEN}+0.001+0+0", 0.9),
        (f"{NEXT_FEN.replace('7r', 'r7')}+0.001+0+0", 0.6),
        ("nonsense", 0.1),
    )
    asked = ((f"P: {FEN}", moves), (f"A: {FEN}+a4a5+a4a5+", states))
    told = [completion(20, text, prompt=p, reward=reward) for p, said in asked for text, reward in said]
    write_lines(folder / "completions.jsonl", told)
    return folder
