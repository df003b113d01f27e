"""One model at several batch sizes, each learning from equally many tokens (lm) or samples (grpo).

A sweep is a folder of runs (`sizes.py` says which files), each in a process of its own; what has ended is
kept when a sweep goes on. Left out: several sizes at once, which would disturb each other's times, and going
on within a size.
"""

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from loguru import logger

from grpo.config import Config, SettingsError, to_flat
from grpo.config.groups import OptimizerSettings
from grpo.config.limits import COUNT, SHARE, check_limits
from grpo.workbench.spec import MadeModel
from grpo.workbench.task import (
    Objective,
    Task,
    alone,
    check_objective,
    model_name,
    model_shape,
    parse_flags,
    settled,
)

ScaleLR = Literal["none", "linear", "sqrt", "tuned"]
TUNE_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
TUNE_UPDATES = 8
"""Updates of a try of a learning rate, at least: after fewer, any rate looks like any other."""
KEPT = ("ok", "out of memory", "diverged")
"""How a size may have ended that is not tried again."""
MAY_CHANGE = ("batch_sizes", "output", "again")
"""Of the settings, when a sweep goes on."""
LOW_RESOURCE = {
    "batch_sizes": 64, "total_tokens": 100_000, "total_samples": 256, "eval_prompts": 32, "evaluations": 4,
    "max_new_tokens": 48, "layers": 2, "width": 128, "context": 64,
}  # fmt: skip
"""What --low-resource lets no setting exceed; layers and width are of a model made by --arch."""
CHOSEN = ("steps", "batch_size", "minutes", "rollout_rows", "score_rows", "name", "runs_dir", "resume",
          "dry_run", "device_memory", "eval_interval", "memory_utilization", "trackers")  # fmt: skip
"""Flags of train_lean.py that follow from those of a sweep."""
OF_LM = Config(
    optimizer=OptimizerSettings(
        learning_rate=1e-3, lr_schedule="cosine", weight_decay=0.1, adam_beta2=0.95, warmup_steps=5
    ),
    eval_prompts=128,
)
"""Defaults of language modelling; of its 100 steps, 5 to warm up."""


@dataclass(frozen=True)
class Sweep:
    """Train one model at several batch sizes, each on equally many tokens (lm) or samples (grpo).

    Other flags are those of train_lean.py, which `--config FILE` holds, too.
    """

    objective: Objective = "lm"
    """lm: plain language modelling on a text. grpo: what train_lean.py does."""
    batch_sizes: tuple[int, ...] = ()
    """Windows (lm) or completions (grpo) an update learns from; none: 8 to 256, or 2 to 64 groups."""
    total_tokens: int = 400_000
    """Tokens that each size learns from (lm), less what does not fill a last batch."""
    total_samples: int = 4096
    """Completions that each size learns from (grpo), less what does not fill a last batch."""
    output: Path | None = None
    """The sweep's folder, new or to be gone on with; None: runs/sweep- and date and time."""
    again: bool = False
    """Do finished sizes again as well."""
    low_resource: bool = False
    """Shrink the sweep for a laptop: fewer and shorter batches, and a smaller model made by --arch."""
    data: str | None = None
    """Text to learn from (lm), its last tenth held out; bundled: chess positions and moves, 0.8 MB."""
    evaluations: Annotated[int, COUNT] = 10
    """Evaluations of each size, at equal tokens or samples, on --eval-prompts held-out windows or prompts."""
    scale_lr: ScaleLR = "none"
    """learning_rate at base_batch_size: keep it, scale it with the size (Goyal et al. 2017), with its square
    root (Krizhevsky 2014; Malladi et al. 2022, for Adam), or try 1/4 to 4 times the latter at each size."""
    base_batch_size: Annotated[int | None, COUNT] = None
    """The batch size that learning_rate is meant for; None: that of --config, or 64."""
    tune_share: Annotated[float, SHARE] = 0.1
    """With scale_lr tuned: share of the tokens or samples that each try gets."""
    warmup_share: Annotated[float | None, SHARE] = None
    """Share of each size's updates in which the learning rate rises from zero; None: warmup_steps / steps."""
    compile: bool = False
    """torch.compile the model (lm)."""
    tf32: bool = False
    """On CUDA, multiply fp32 matrices in TF32."""
    made: MadeModel = field(default_factory=MadeModel)
    train: Config = field(default_factory=Config)

    def __post_init__(self) -> None:
        if not self.batch_sizes:
            unit = self.train.group_size if self.objective == "grpo" else 4
            object.__setattr__(self, "batch_sizes", tuple(unit * 2**power for power in range(1, 7)))
        check_limits(self)
        for wrong in _wrong(self):
            raise SettingsError(wrong)

    @property
    def unit(self) -> str:
        return "tokens" if self.objective == "lm" else "samples"

    @property
    def total(self) -> int:
        """Units that each size learns from."""
        return self.total_tokens if self.objective == "lm" else self.total_samples

    @property
    def row_units(self) -> int:
        """Units in a row of a batch."""
        return self.made.context if self.objective == "lm" else 1

    @property
    def warm_up(self) -> float:
        """Share of the updates."""
        of_train = self.train.optimizer.warmup_steps / self.train.steps
        return min(1.0, of_train if self.warmup_share is None else self.warmup_share)

    @property
    def base(self) -> int:
        """The batch size that the learning rate is meant for."""
        of_train = self.train.batch_size
        return self.base_batch_size or (64 if of_train == "auto" else of_train)

    def num_updates(self, batch_size: int, total: int | None = None) -> int:
        return (total or self.total) // (batch_size * self.row_units)

    def rate(self, batch_size: int) -> float:
        """The peak learning rate of a size; with scale_lr tuned, the middle of the grid."""
        ratio = batch_size / self.base
        factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio), "tuned": math.sqrt(ratio)}
        return self.train.optimizer.learning_rate * factor[self.scale_lr]

    def tune_total(self, batch_size: int) -> int:
        """Units of a try of a learning rate."""
        least = TUNE_UPDATES * batch_size * self.row_units
        return min(self.total, max(int(self.tune_share * self.total), least))

    def task(self, batch_size: int, rate: float, *, total: int | None = None, evaluations: int = 0) -> Task:
        """What a size's process trains. SettingsError where that cannot be."""
        steps, optimizer = self.num_updates(batch_size, total), self.train.optimizer
        optimizer = replace(optimizer, learning_rate=rate, warmup_steps=round(self.warm_up * steps))
        every = max(1, round(steps / (evaluations or self.evaluations)))
        train = alone(
            self.train, steps=steps, optimizer=optimizer, eval_interval=every,
            batch_size=batch_size if self.objective == "grpo" else self.train.batch_size,
        )  # fmt: skip
        return Task(self.objective, train, batch_size, self.made, self.data, self.compile, self.tf32)

    def as_json(self) -> dict[str, Any]:
        flat = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return flat | {
            "output": str(self.output) if self.output else None, "batch_sizes": list(self.batch_sizes),
            "made": asdict(self.made), "train": to_flat(self.train),
        }  # fmt: skip


def _wrong(settings: Sweep) -> Iterator[str]:
    if settings.compile and settings.objective == "grpo":
        yield "compile is on, which is for --objective lm: leave it out for grpo."
    check_objective(settings.objective, settings.made)
    name, row = f"total_{settings.unit}", settings.row_units
    for size in settings.batch_sizes:
        if size < 1:
            yield f"batch_sizes holds {size}: a batch has at least 1 row."
        elif settings.num_updates(size) < 1:
            yield (
                f"{name} is {settings.total}, less than one batch of {size}, which has {size * row} "
                f"{settings.unit}: give at least {size * row}, or leave that size out."
            )
        else:
            settings.task(size, settings.rate(size))


def parse_sweep(arguments: Sequence[str] | None = None) -> Sweep:
    """From the command line. SettingsError for what is wrong."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    is_grpo = "--objective=grpo" in words or ("--objective", "grpo") in pairwise(words)
    return parse_flags(
        Sweep, Config(batch_size=64) if is_grpo else OF_LM, chosen=CHOSEN, arguments=words,
        objective="grpo" if is_grpo else "lm",
    )  # fmt: skip


def shrunk(settings: Sweep) -> tuple[Sweep, list[str]]:
    """A sweep that exceeds LOW_RESOURCE in nothing that matters to it, and what changed, in words."""
    sizes = tuple(size for size in settings.batch_sizes if size <= LOW_RESOURCE["batch_sizes"])
    sizes = sizes or (min(settings.batch_sizes),)
    said = [f"batch_sizes up to {max(sizes)}"] if sizes != settings.batch_sizes else []
    sampling, shape = settings.train.sampling, [] if settings.made.arch is None else ["layers", "width"]
    own, of_lm = ["evaluations"], settings.objective == "lm"

    def lowered(part: Any, names: Sequence[str]) -> Any:
        less = {name: LOW_RESOURCE[name] for name in names if getattr(part, name) > LOW_RESOURCE[name]}
        said.extend(f"{name} {getattr(part, name)} to {value}" for name, value in less.items())
        return replace(part, **less)

    made = lowered(settings.made, ["context", *shape] if of_lm else [])
    train = replace(lowered(settings.train, ["eval_prompts"]),
                    sampling=lowered(sampling, [] if of_lm else ["max_new_tokens"]))  # fmt: skip
    settings = replace(settings, batch_sizes=sizes, made=made, train=train)
    return lowered(settings, [f"total_{settings.unit}", *own]), said


# ----------------------------------------------------------------------------------------- opening


def open_sweep(settings: Sweep) -> tuple[Sweep, Path]:
    """Check what can be checked beforehand, and make the sweep's folder or go on in it.

    The settings as they are on this machine, and the folder. ValueError for what a user can mend.
    """
    import torch

    from grpo.workbench.corpus import open_corpus, text_file, trained_tokenizer
    from grpo.workbench.lm import num_parameters
    from grpo.workbench.machine import look

    if settings.low_resource:
        settings, changes = shrunk(settings)
        logger.info("low resource: {}", "; ".join(changes) or "nothing to shrink")
        if settings.train.device == "auto" and torch.backends.mps.is_available():
            settings = replace(settings, train=replace(settings.train, device="mps"))
    settings = replace(settings, train=settled(settings.train, settings.made))
    tokenizer = None
    if settings.objective == "lm":
        corpus = open_corpus(settings.data, settings.train, settings.made)
        logger.info("text: {:,} tokens to learn from", corpus.num_train)
        tokenizer = trained_tokenizer(text_file(settings.data), settings.made)
    else:
        _check_grpo(settings)
    train = settings.train
    machine = look(train.device, train.precision, train.memory_limit)
    if settings.compile and machine.no_compiler:
        raise SettingsError(f"compile is on, but {machine.no_compiler}; or leave it out.")
    if settings.tf32 and not machine.device.startswith("cuda"):
        raise SettingsError(f"tf32 is on, but {machine.device} has no such mode: leave it out.")
    train = replace(train, device=machine.device, precision=machine.precision)
    settings = replace(settings, train=train)
    folder = settings.output or Path("runs") / f"sweep-{datetime.now():%Y%m%d-%H%M%S}"
    shape = model_shape(train, settings.made)
    _open_folder(folder, {
        **_in_common(settings), "num_parameters": num_parameters(shape), "device_name": machine.device_name,
        "usable_bytes": machine.usable_bytes,
    })  # fmt: skip
    if tokenizer:
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
    tf32, compiled = ("on" if on else "off" for on in (settings.tf32, settings.compile))
    logger.info("{}, {}; TF32 {}, compile {}", machine.device_name, machine.precision, tf32, compiled)
    return settings, folder


def _check_grpo(settings: Sweep) -> None:
    """Model, lengths, prompts and rewards, as a run would find them."""
    from grpo.data.reward_files import PROMPTS_LOOKED_AT
    from grpo.data.reward_functions import RewardFunctions
    from grpo.run.loading import load_source

    config = settings.train
    source = load_source(config)
    rewards = RewardFunctions(config.reward, config.reward_weights)
    rewards.check(source.tasks, source.longest(PROMPTS_LOOKED_AT))


def _in_common(settings: Sweep) -> dict[str, Any]:
    """Of sweep.json: what all sizes have in common, and all that repeats the sweep."""
    import torch
    import transformers

    from grpo.config.sizes import parse_size

    train, is_lm = settings.train, settings.objective == "lm"
    optimizer = train.optimizer
    quality = (
        {"name": "held-out loss", "better": "lower", "unit": "nats a token"}
        if is_lm
        else {"name": "held-out reward", "better": "higher", "unit": ""}
    )
    return {
        "objective": settings.objective, "unit": settings.unit, "total": settings.total,
        "batch_sizes": sorted(set(settings.batch_sizes)), "model": model_name(train, settings.made),
        "precision": train.precision, "learning_rate": optimizer.learning_rate,
        "base_batch_size": settings.base, "scale_lr": settings.scale_lr,
        "lr_schedule": optimizer.lr_schedule, "min_lr_ratio": optimizer.min_lr_ratio,
        "warmup_share": settings.warm_up, "adam_beta1": optimizer.adam_beta1,
        "adam_beta2": optimizer.adam_beta2, "weight_decay": optimizer.weight_decay,
        "context": settings.made.context if is_lm else None,
        "group_size": None if is_lm else train.group_size,
        "memory_limit_bytes": parse_size(train.memory_limit) if train.memory_limit else None,
        "compile": settings.compile, "tf32": settings.tf32, "quality": quality, "seed": train.seed,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "started": datetime.now().isoformat(timespec="seconds"), "settings": settings.as_json(),
    }  # fmt: skip


def _open_folder(folder: Path, header: Mapping[str, Any]) -> None:
    """Make the folder, or go on in it. SettingsError if it holds a sweep with other settings."""
    from grpo.files import write_whole
    from grpo.workbench.sizes import SWEEP_FILE, read_json

    file, merged = folder / SWEEP_FILE, json.loads(json.dumps(header))  # as it will be read again
    if file.exists():
        before = read_json(file)
        if not before:
            raise SettingsError(f"output is {str(folder)!r}, whose {SWEEP_FILE} is broken: choose another.")
        if differing := _differences(before.get("settings", {}), merged["settings"]):
            raise SettingsError(
                f"output is {str(folder)!r}, which holds a sweep with other settings: "
                f"{'; '.join(differing)}. Give the same ones, or another --output."
            )
        merged["batch_sizes"] = sorted({*before["batch_sizes"], *merged["batch_sizes"]})
        merged["started"] = before["started"]
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(merged, indent=1) + "\n")


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What is not the same, setting by setting."""
    told = []
    for name, new in now.items():
        old = before.get(name)
        if isinstance(new, dict) and isinstance(old, dict):
            told += _differences(old, new)
        elif old != new and name not in MAY_CHANGE:
            told.append(f"{name} is {old} there and {new} here")
    return told


# ----------------------------------------------------------------------------------------- running

Watch = Callable[[int, int, Mapping[str, Any]], None]
"""Told of each line of metrics that a size, of so many updates, writes."""


def run_sweep(settings: Sweep, folder: Path, watch: Watch = lambda size, updates, line: None) -> None:
    """All sizes asked for; those that have ended already are kept."""
    from grpo.workbench.sizes import ENDED_FILE, read_json, size_folder
    from grpo.workbench.trial import Ended, run_task, write_ended, write_task

    sizes = sorted(set(settings.batch_sizes))
    for number, size in enumerate(sizes, start=1):
        own = size_folder(folder, size)
        status = read_json(own / ENDED_FILE).get("status")
        if status in KEPT and not settings.again:
            logger.info("size {}: kept from before ({})", size, status)
            continue
        logger.info("size {} ({} of {})", size, number, len(sizes))
        shutil.rmtree(own, ignore_errors=True)  # of a try that was cut short
        rate, tried, ended = settings.rate(size), list[dict[str, Any]](), Ended("ok")
        if settings.scale_lr == "tuned":
            rate, tried, ended = _tune(settings, size, folder)
        task = settings.task(size, rate)
        if ended.status == "ok":
            ended = run_task(task, own, partial(watch, size, task.train.steps), facts=_facts(task, tried))
        else:
            write_task(task, own, _facts(task, tried))
            write_ended(own, ended)
        logger.info("size {}: {}{}", size, ended.status, f" ({ended.message})" if ended.message else "")


def _facts(task: Task, tried: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of a size's task, for a reader."""
    return {
        "learning_rate": task.train.optimizer.learning_rate, "updates": task.train.steps,
        "warmup_updates": task.train.optimizer.warmup_steps, "tuned": list(tried),
    }  # fmt: skip


def _tune(settings: Sweep, size: int, folder: Path) -> tuple[float, list[dict[str, Any]], Any]:
    """The rate whose held-out quality is best after a short run, all that were tried, and how that ended.

    It ends early where memory runs out, and badly only where no try ended well.
    """
    from grpo.workbench.sizes import OK, read_size, size_folder
    from grpo.workbench.trial import Ended, run_task

    tried: list[dict[str, Any]] = []
    total, middle, ended = settings.tune_total(size), settings.rate(size), Ended("ok")
    for factor in TUNE_FACTORS:
        rate = factor * middle
        tries = folder / f"tune-{size:05d}-{rate:.2g}"
        ended = run_task(settings.task(size, rate, total=total, evaluations=1), size_folder(tries, size))
        found = read_size(tries, size, {"objective": settings.objective})
        heldout = found.final_heldout if ended.status == OK else None
        tried.append({"learning_rate": rate, "heldout": heldout})
        logger.info("size {}: learning rate {:.2g}: held-out {}", size, rate, heldout)
        if ended.status in ("out of memory", "failed"):
            break
    good = [each for each in tried if each["heldout"] is not None]
    if not good:
        return middle, tried, ended
    best = (max if settings.objective == "grpo" else min)(good, key=lambda each: each["heldout"])
    rate = float(best["learning_rate"])
    if len(tried) > 1 and rate in (tried[0]["learning_rate"], tried[-1]["learning_rate"]):
        logger.warning("the best learning rate, {:.2g}, is at the edge of those tried", rate)
    return rate, tried, ended if ended.status in ("out of memory", "failed") else Ended("ok")
