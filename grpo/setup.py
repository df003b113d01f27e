"""Everything a run needs, made in the order in which it can fail: cheap checks first."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import torch
from loguru import logger
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from grpo.adapters import check_peft, check_resumed
from grpo.checkpoint import Checkpoint, CheckpointFolder
from grpo.clock import Clock
from grpo.config import CONFIG_FILE, Config, SettingsError, to_flat, write_yaml
from grpo.dealt import Share
from grpo.loading import check_shard, load_models, load_source, shard_models
from grpo.memory import AdaptiveMemory, Budget, MemoryMonitor, limit_memory, make_budget, parse_size
from grpo.model import Policy, RolloutModel, choose_device, choose_model, compute_dtype
from grpo.optimizer import check_optimizer, make_optimizer
from grpo.plan_tables import plan_table
from grpo.planning import Workload, longest_prompt, plan_memory, trace_phases
from grpo.prompts import PromptSource
from grpo.reference import Reference
from grpo.reward_functions import RewardFunctions
from grpo.rollout import rollout
from grpo.sampling import step_uniforms
from grpo.scoring import micro_batch_logprobs, micro_batches
from grpo.tracking import check_trackers
from grpo.values import Prompt, Rollout
from grpo.world import World, open_world
from rewards.engine import EnginePool, find_stockfish


@dataclass
class Run:
    """The parts of one run. `checkpoint` is what it goes on from, if anything."""

    config: Config
    folder: Path
    source: PromptSource
    eval_prompts: list[Prompt]
    engine: EnginePool | None
    rewards: RewardFunctions
    policy: Policy
    reference: Reference | None
    sampler: RolloutModel
    optimizer: torch.optim.Optimizer
    checkpoints: CheckpointFolder
    checkpoint: Checkpoint | None
    clock: Clock
    monitor: MemoryMonitor
    memory: AdaptiveMemory
    budget: Budget
    """At the start; what others hold may change it."""
    longest_prompt: int
    """Tokens, of the prompts that are known beforehand."""
    world: World = field(default_factory=World)
    started: float = field(default_factory=time.monotonic)

    def held_out_reward(self, rollout: Rollout) -> Tensor:
        """(N,) rewards, NaN for rows that no reward function scores."""
        return self.rewards(rollout).rewards_where_scored

    def share(self, num_groups: int) -> Share:
        """This process's of a step's groups."""
        groups = self.world.share(num_groups)
        idle = self.world.largest_share(num_groups) - len(groups) if self.config.shard else 0
        return Share(groups, self.config.group_size, idle)

    def time_is_up(self) -> bool:
        """Whether the run has had the minutes it was given."""
        minutes = self.config.minutes
        return minutes is not None and time.monotonic() - self.started > 60 * minutes


@contextmanager
def open_run(config: Config, *, prediction_bias: float = 1.0) -> Iterator[Run]:
    """Build a run, and end its engine processes afterwards. ValueError for what a user can mend.

    Under a launcher of several processes each builds its own, and they find each other first; ProcessLost
    where one of the others fails. prediction_bias: multiplies what the memory plan expects; for
    experiments that want it wrong.
    """
    with open_world(config.device, wait_minutes=config.wait_minutes) as (world, device), ExitStack() as stack:
        yield _make_run(config, world, choose_device(device), stack, prediction_bias)


def _make_run(
    config: Config, world: World, device: torch.device, stack: ExitStack, prediction_bias: float
) -> Run:
    config = replace(config, model=choose_model(config.model, device))
    if config.shard:
        check_shard(config, world)
    reference_device = choose_device(config.reference_device) if config.reference_device else device
    _check_installed(config, device)
    rewards = RewardFunctions(config.reward, config.reward_weights)
    folder = world.from_main("the choice of a folder", _choose_folder(config) if world.is_main else Path())
    checkpoints, checkpoint = _open_checkpoints(config, folder)
    source = load_source(config)
    rewards.check_tasks(source.tasks)
    engine = _start_engine(config, stack) if "policy" in source.tasks else None
    policy, reference = load_models(config, checkpoint, device, reference_device)
    _check_same(world, config, checkpoint, source, policy.model)
    if config.shard:
        shard_models(config, policy, reference, device)
    sampler = RolloutModel(policy.model, policy.model.dtype if config.shard else policy.compute_dtype)
    optimizer = make_optimizer(policy.model, config.optimizer)
    monitor = MemoryMonitor(device, limited=config.memory_limit is not None)
    work = Workload(
        config, policy.model.config, policy.model.config._attn_implementation, policy.compute_dtype,
        longest_prompt(source, policy.tokenizer, config),
        reference_here=reference_device == device, device_type=device.type, processes=world.size,
    )  # fmt: skip
    if config.memory_limit is not None:
        _rehearse(config, policy, sampler, source)
    budget = _budget(config, monitor, world)
    work, memory = _plan_together(world, work, monitor, budget, prediction_bias)
    config = work.config
    if world.is_main:
        _claim_folder(folder, config)
    _limit_memory(config, monitor)
    return Run(
        config=config, folder=folder, source=source,
        eval_prompts=_choose_eval_prompts(source.heldout, config.eval_prompts),
        engine=engine, rewards=rewards.with_engine(engine),
        policy=policy, reference=reference, sampler=sampler, optimizer=optimizer,
        checkpoints=checkpoints, checkpoint=checkpoint,
        clock=Clock(device), monitor=monitor, memory=memory, budget=budget(),
        longest_prompt=work.longest_prompt, world=world,
    )  # fmt: skip


def _check_installed(config: Config, device: torch.device) -> None:
    """ValueError for trackers, packages and a Stockfish that are asked for and not there."""
    check_trackers(config.trackers)
    check_peft(config.lora)
    check_optimizer(config.optimizer, device, compute_dtype(config.precision, device))
    if config.engine != "off":
        find_stockfish(config.stockfish_path)


def _open_checkpoints(config: Config, folder: Path) -> tuple[CheckpointFolder, Checkpoint | None]:
    """The run's checkpoints, and the one it goes on from, if it is to."""
    checkpoints = CheckpointFolder(
        folder / "checkpoints", keep=config.keep_checkpoints, merge=config.lora.lora_merge
    )
    if not config.resume:
        return checkpoints, None
    checkpoint = checkpoints.newest_intact()
    if checkpoint is None:
        raise SettingsError(f"resume: {str(folder)!r} holds no intact checkpoint; start without --resume.")
    check_resumed(config.lora, checkpoint.folder)
    return checkpoints, checkpoint


def show_plans(run: Run, console: Console) -> None:
    """The table of the first process's plan; of the others, how many rows they do at once."""
    console.print(plan_table(run.memory.plan, run.budget))
    rows = ", ".join(f"{phase} {plan.rows}" for phase, plan in run.memory.plan.items())
    for process, plan in enumerate(run.world.exchange("the plans", f"{rows}; budget {run.budget}")):
        if process:
            logger.info("process {} has rows at once: {}", process, plan)


_OF_THIS_MACHINE = {
    *("device", "reference_device", "memory_utilization", "memory_limit", "gradient_checkpointing"),
    *("rollout_rows", "score_rows", "train_rows"),
    *("stockfish_path", "num_engines", "runs_dir", "name", "resume"),
}
"""Settings in which processes may differ."""


def _check_same(
    world: World, config: Config, checkpoint: Checkpoint | None, source: PromptSource, model: PreTrainedModel
) -> None:
    """SettingsError unless all processes train the same model on the same prompts in the same way."""
    if world.size == 1:
        return
    of_this_machine = _OF_THIS_MACHINE - ({"memory_limit"} if config.shard else set())
    settings = {name: value for name, value in to_flat(config).items() if name not in of_this_machine}
    mine = settings | {
        "the checkpoint to go on from": checkpoint.folder.name if checkpoint else None,
        "the prompts (a digest)": source.state()["rows_digest"],
        "the model (sum of weights)": sum(p.double().abs().sum().item() for p in model.parameters()),
    }
    for rank, theirs in enumerate(world.exchange("the comparison of settings", mine)):
        for what, value in theirs.items():
            if value != mine[what]:
                raise SettingsError(
                    f"process {rank} has {value} for {what}, process {world.rank} {mine[what]}: give all "
                    "machines the same command, files and versions, and --resume a folder that all see."
                )


def _rehearse(config: Config, policy: Policy, sampler: RolloutModel, source: PromptSource) -> None:
    """Sample one group and take its gradient, so that kernels, threads and workspaces are there.

    What they hold is then measured, as part of what is not torch's, before a limit is enforced.
    """
    prompts = source.longest(1)[:1]
    uniforms = step_uniforms(config.group_size, config.sampling.max_new_tokens, seed=config.seed, step=0)
    rows = config.group_size
    made = rollout(sampler.model, policy.tokenizer, prompts, uniforms, config.sampling, rows=rows)
    (batch,) = micro_batches(made, rows)
    logp, _ = micro_batch_logprobs(
        policy.model, batch, temperature=config.sampling.temperature, dtype=policy.compute_dtype
    )
    logp.sum().backward()  # type: ignore[no-untyped-call]
    policy.model.zero_grad(set_to_none=True)


def _plan_together(
    world: World, work: Workload, monitor: MemoryMonitor, budget: Callable[[], Budget], bias: float
) -> tuple[Workload, AdaptiveMemory]:
    """Each process's own plan, of a batch size that is the same for all."""
    if world.size > 1:
        with world.main_first("the first plan"):
            trace_phases(work)
    return plan_memory(
        work, monitor, budget, bias=bias, agree=lambda rows: min(world.exchange("the batch size", rows))
    )


def _budget(config: Config, monitor: MemoryMonitor, world: World) -> Callable[[], Budget]:
    """What this process may hold, as it is whenever that is asked."""
    limit = parse_size(config.memory_limit) if config.memory_limit else None
    utilization = config.memory_utilization

    def budget() -> Budget:
        memory = monitor.memory().shared_by(world.sharing)
        return make_budget(memory, utilization=utilization, limit_bytes=limit)

    return budget


def _limit_memory(config: Config, monitor: MemoryMonitor) -> None:
    """Enforce --memory-limit where that is possible: last, when threads and processes have started."""
    if config.memory_limit:
        limit = parse_size(config.memory_limit)
        how = limit_memory(monitor.device, limit, monitor.memory().total_bytes)
        logger.info("memory limit {}: {}", config.memory_limit, how)
        if monitor.device.type == "cpu" and compute_dtype(config.precision, monitor.device) == torch.bfloat16:
            logger.info("in bf16 oneDNN keeps kernels it compiles: a tight limit wants --precision fp32")


def _start_engine(config: Config, stack: ExitStack) -> EnginePool | None:
    """Stockfish, where it is wanted and there; `stack` ends it."""
    if config.engine == "off":
        return None
    if find_stockfish(config.stockfish_path) is None:
        logger.info("no Stockfish found (apt-get install stockfish): the labels of the prompts judge moves")
        return None
    return stack.enter_context(
        EnginePool(config.stockfish_path, depth=config.engine_depth, num_engines=config.num_engines)
    )


def _choose_folder(config: Config) -> Path:
    """The run's folder; one of date and time gets a number if another run has just taken it."""
    if config.resume is not None:
        return config.resume
    if config.name is None:
        stem = config.runs_dir / datetime.now().strftime("%Y%m%d-%H%M%S")
        folders = (stem if i == 1 else stem.with_name(f"{stem.name}-{i}") for i in itertools.count(1))
        return next(folder for folder in folders if not folder.exists())
    folder = config.runs_dir / config.name
    if CheckpointFolder(folder / "checkpoints", keep=1).all():
        raise SettingsError(
            f"name is {folder.name!r}, but {str(folder)!r} is a run already: "
            f"go on with --resume {folder}, or choose another name."
        )
    return folder


def _claim_folder(folder: Path, config: Config) -> None:
    """Make the folder and write the settings that repeat the run (to repeat it is not to resume it)."""
    folder.mkdir(parents=True, exist_ok=config.name is not None or config.resume is not None)
    write_yaml(replace(config, resume=None), folder / CONFIG_FILE)


def _choose_eval_prompts(heldout: list[Prompt], count: int) -> list[Prompt]:
    """The first held-out prompts, as many of each task."""
    tasks = sorted({prompt.task for prompt in heldout})
    by_task = [[prompt for prompt in heldout if prompt.task == task] for task in tasks]
    each = -(-count // max(1, len(tasks)))
    return [prompt for prompts in by_task for prompt in prompts[:each]]
