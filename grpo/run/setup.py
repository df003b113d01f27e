"""Everything a run needs, made in the order in which it can fail: cheap checks first."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from loguru import logger
from rich.console import Console

from grpo.config import Config
from grpo.config.sizes import parse_size
from grpo.data import PromptSource, check_spec
from grpo.data.maker import template_text
from grpo.data.reward_files import PROMPTS_LOOKED_AT
from grpo.data.reward_functions import RewardFunctions
from grpo.data.tokens import put_behind
from grpo.distributed import World, largest_share, open_world
from grpo.distributed.share import Share
from grpo.learning.optimizer import check_optimizer, make_optimizer
from grpo.memory import Device, DoesNotFit, Fit, is_out_of_memory
from grpo.memory.recovery import release_cache
from grpo.model.adapters import check_peft
from grpo.model.load import Policy, end_names, end_tokens
from grpo.model.target import choose_device, choose_model, compute_dtype, make_target, multiplies_in_bf16
from grpo.model.weights import Reference, RolloutModel
from grpo.plan.advice import does_not_stay
from grpo.plan.tables import Measured, Plan, plan_table
from grpo.plan.workload import Workload, longest_prompt
from grpo.rollout.decoder import KeptArena, records_steps
from grpo.run.checkpoint import Checkpoint, CheckpointFolder, checkpoint_bytes
from grpo.run.clock import Clock
from grpo.run.folder import check_room, hold_folder, keep_rewards, open_checkpoints, write_settings
from grpo.run.given import Given, from_anywhere
from grpo.run.loading import check_quantized, check_shard, load_models, load_source, room_in, shard_models
from grpo.run.planning import Models, plan_run, stays_gathered
from grpo.run.same_everywhere import check_same
from grpo.run.screen import keep_log
from grpo.run.tracking import check_trackers
from grpo.types import Prompt
from rewards.engine import EnginePool, find_stockfish

NOTHING = Given()
"""Not given: the settings name it."""


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
    device: Device
    fit: Fit
    plan: Plan
    """As it was before the first step."""
    measured: Measured
    longest_prompt: int
    """Tokens."""
    is_trial: bool = False
    """Whether nothing is to be saved."""
    stays_gathered: bool = False
    """Whether a sharded model's weights are all gathered while it samples."""
    kept: KeptArena | None = None
    """What decoding leaves for the next rollout, where it records."""
    world: World = field(default_factory=World)

    def share(self, num_groups: int) -> Share:
        """This process's of a step's groups."""
        groups = self.world.share(num_groups)
        idle = largest_share(num_groups, self.world.size) - len(groups) if self.config.shard else 0
        return Share(groups, self.config.group_size, idle)


@contextmanager
def open_run(config: Config, given: Given = NOTHING) -> Iterator[Run]:
    """Build a run, and end its engine processes afterwards. ValueError for what a user can mend.

    Under a launcher of several processes each builds its own, and they find each other first; ProcessLost
    where one of the others fails. given: instead of what the settings name.
    """
    config = from_anywhere(given.named_in(config))
    with open_world(config.device, wait_minutes=config.wait_minutes) as (world, device), ExitStack() as stack:
        yield _make_run(config, given, world, choose_device(device), stack)


def _make_run(config: Config, given: Given, world: World, device: torch.device, stack: ExitStack) -> Run:
    config = replace(config, model=choose_model(config.model, device))
    if config.shard:
        check_shard(config, world)
    reference_device = choose_device(config.reference_device) if config.reference_device else device
    _check_installed(config, device)
    _warn(config, device)
    rewards = RewardFunctions(given.rewards or config.reward, config.reward_weights)
    folder = stack.enter_context(hold_folder(config)) if world.is_main else Path()
    folder = Path(world.from_main("the choice of a folder", str(folder)))
    checkpoints, checkpoint = open_checkpoints(config, folder)
    check_spec(config.prompts if given.prompts is None else given.prompts)
    model_source = given.model_source(config)
    shape = model_source.load_config()
    config = check_quantized(config, shape)
    room = room_in(shape, model_source.load_tokenizer(), config.max_new_tokens)
    source = load_source(config, room, given.prompts)
    rewards.check(source.tasks, source.longest(PROMPTS_LOOKED_AT))
    engine = _start_engine(config, stack) if "policy" in source.tasks else None
    limit = parse_size(config.memory_limit) if config.memory_limit else None
    meter = Device(
        device, utilization=config.memory_utilization, limit_bytes=limit, sharing=world.sharing
    )  # before anything is loaded
    target = make_target(shape, device, config.precision)
    with _explaining_what_stays(Workload(config, target, 1, reference_device == device, world.size), meter):
        policy, reference = load_models(
            config, model_source, checkpoint, target, reference_device, folder if world.is_main else None
        )
        if file := config.chat_template:  # which is saved with the model
            policy.tokenizer.chat_template = template_text(file, "chat_template")
        if world.is_main and not given.is_trial:
            checkpoints.try_out(policy.model, policy.tokenizer)
        check_same(world, config, checkpoint, source, policy.model)
        if config.shard:
            shard_models(config, policy, reference)
        sampler = RolloutModel(policy.model, target.exact_dtype if config.shard else target.dtype)
        optimizer = make_optimizer(policy.model, config)
    _tidy_up(device)
    _say_where_texts_end(policy, config)
    longest = longest_prompt(source, policy.tokenizer)
    work = Workload(config, target, longest, reference_device == device, world.size)
    with ExitStack() as limited:
        work, fit, plan = plan_run(
            work, world, meter, Models(policy, sampler, reference), limited, given.is_trial
        )
        stack.push(limited.pop_all())
    config = work.config
    if world.is_main:
        if not given.is_trial:
            check_room(config, folder, checkpoint_bytes(policy.model, optimizer), len(checkpoints.all()))
        write_settings(folder, config)
        stack.enter_context(keep_log(folder))
        keep_rewards(folder, config)
    records = not config.shard and records_steps(target.model_config, device.type)
    return Run(
        config=config, folder=folder, source=source,
        eval_prompts=_choose_eval_prompts(config, source),
        engine=engine, rewards=rewards.with_engine(engine),
        policy=policy, reference=reference, sampler=sampler, optimizer=optimizer,
        checkpoints=checkpoints, checkpoint=checkpoint,
        clock=Clock(device), device=meter, fit=fit, plan=plan, measured=Measured(fit),
        longest_prompt=work.longest_prompt, is_trial=given.is_trial,
        stays_gathered=config.shard and stays_gathered(world, fit, work, policy),
        kept=KeptArena() if records else None, world=world,
    )  # fmt: skip


@contextmanager
def _explaining_what_stays(work: Workload, meter: Device) -> Iterator[None]:
    """DoesNotFit, with what exists all along and who else is there, when memory runs out on the way."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise DoesNotFit(f"{does_not_stay(work, Fit(meter))} ({reason})") from error


def _check_installed(config: Config, device: torch.device) -> None:
    """ValueError for trackers, packages and a Stockfish that are asked for and not there."""
    check_trackers(config.trackers)
    check_peft(config)
    check_optimizer(config, device, compute_dtype(config.precision, device))
    if config.engine != "off":
        find_stockfish(config.stockfish_path)


def _warn(config: Config, device: torch.device) -> None:
    """Of what can be done, and is hardly wanted."""
    if config.kl_in_reward and config.advantage_scale == "group":
        logger.warning(
            "kl_in_reward is on, and advantage_scale is group: where a group's rewards are equal, the KL is "
            "all that differs, and is scaled up to any reward's size; give --advantage-scale batch or none."
        )
    if config.precision == "bf16" and not multiplies_in_bf16(device):
        logger.warning(
            "precision is bf16, in which this {} does not multiply: its products are emulated, and a step "
            "takes many times as long; give --precision fp32, or leave it auto.",
            "processor" if device.type == "cpu" else "device",
        )


def _say_where_texts_end(policy: Policy, config: Config) -> None:
    """Completions, by which tokens; of these what the model cannot write; and prompts, where that is open."""
    if config.ignore_ends:
        logger.info("completions all have {} tokens: nothing ends them", config.max_new_tokens)
        return
    ends = end_names(policy.model, policy.tokenizer, config.stop_texts)
    logger.info("completions end at {}, or after {} tokens", " or ".join(ends), config.max_new_tokens)
    rows = policy.model.get_output_embeddings().weight.shape[0]
    for token, name in zip(end_tokens(policy.model, policy.tokenizer), ends, strict=False):
        if token >= rows:  # one that only the generation configuration names others do without
            level = "WARNING" if token == policy.tokenizer.eos_token_id else "INFO"
            logger.log(
                level, "the model has {} tokens and cannot write {}, which is to end a text", rows, name
            )
    if behind := put_behind(policy.tokenizer):
        names = " ".join(policy.tokenizer.convert_ids_to_tokens(behind))
        logger.info("the tokenizer puts {} behind a text: prompts go without it, as they are to go on", names)


def show_plans(run: Run, console: Console) -> None:
    """The table of the first process's plan; of the others, how many rows they do at once."""
    console.print(plan_table(run.plan))
    rows = ", ".join(f"{phase} {rows}" for phase, rows in run.fit.planned().items())
    for process, plan in enumerate(run.world.exchange("the plans", f"{rows}; budget {run.plan.budget}")):
        if process:
            logger.info("process {} has rows at once: {}", process, plan)


def _tidy_up(device: torch.device) -> None:
    """Leave nothing of what came before on an accelerator: the plan takes it for always held."""
    if device.type != "cpu":
        gc.collect()
        release_cache()


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


def _choose_eval_prompts(config: Config, source: PromptSource) -> list[Prompt]:
    """As many held-out prompts of each task, those of the lowest hashes. It is said where they are few."""
    num_heldout = Counter(prompt.task for prompt in source.heldout)
    each = -(-config.eval_prompts // max(1, len(num_heldout)))
    chosen = source.lowest_heldout(each)
    if config.eval_interval and not chosen:
        why = f"--heldout-share {config.heldout_share} holds out no prompts"
        if not config.eval_prompts:
            why = "--eval-prompts is 0"
        logger.warning("nothing will be evaluated: {}; give more, or --eval-interval 0", why)
    elif config.eval_interval and len(chosen) < config.eval_prompts:
        few = ", ".join(f"{count} {task}" for task, count in sorted(num_heldout.items()) if count < each)
        logger.info(
            "held out are only {} prompts: evaluations use {}, not the {} of --eval-prompts",
            few, len(chosen), config.eval_prompts,
        )  # fmt: skip
    return sorted(chosen, key=lambda prompt: prompt.task)
