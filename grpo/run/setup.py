"""Everything a run needs, made in the order in which it can fail: open, load, warm up."""

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from rich.console import Console

from grpo.config import Config
from grpo.config.sizes import parse_size
from grpo.data import PromptSource, check_spec
from grpo.data.kept_files import keep_files
from grpo.data.maker import template_text
from grpo.data.reward_files import PROMPTS_LOOKED_AT, resolve_max_new_tokens
from grpo.data.reward_functions import RewardFunctions
from grpo.distributed import World, open_world
from grpo.distributed.share import Share
from grpo.errors import UserError
from grpo.learning.loss_scale import LossScale
from grpo.learning.masters import join_masters, split_masters
from grpo.learning.optimizer import check_optimizer, make_optimizer
from grpo.logs.clock import Clock
from grpo.logs.model_card import check_hub, push
from grpo.logs.screen import keep_log
from grpo.logs.starts import log_start
from grpo.logs.tracking import check_trackers
from grpo.logs.waiting import log_if_slow
from grpo.memory import Device, DoesNotFit, Fit, is_out_of_memory, survive
from grpo.memory.recovery import release_cache
from grpo.model.adapters import check_peft
from grpo.model.load import context_length
from grpo.model.target import choose_device, choose_model, compute_dtype, make_target, multiplies_in_bf16
from grpo.model.weights import RolloutModel
from grpo.plan.advice import explain_model_does_not_fit
from grpo.plan.phase_probe import PhaseProbe
from grpo.plan.tables import Measured, plan_table
from grpo.plan.workload import Workload, longest_prompt
from grpo.rewards import EnginePool, find_stockfish
from grpo.rollout.decoder import ArenaCache, records_steps
from grpo.run import loading
from grpo.run.checkpoint import ONLY_TO_TRAIN, checkpoint_bytes, saved_model_bytes
from grpo.run.folder import check_room, hold_folder, open_checkpoints, write_settings
from grpo.run.inputs import Inputs
from grpo.run.planning import plan_run, stays_gathered
from grpo.run.training_state import take_snapshot
from grpo.types import Prompt

NOTHING = Inputs()


@contextmanager
def open_run(config: Config, inputs: Inputs = NOTHING) -> Iterator["Run"]:
    """Build a run, and end its engine processes afterwards. ValueError for what a user can mend.

    Under a launcher of several processes each builds its own, and they find each other first; ProcessLost
    where one of the others fails. inputs: instead of what the settings name.
    """
    config = inputs.named_in(config)
    with (
        ExitStack() as at_the_end,
        open_world(config.device, wait_minutes=config.wait_minutes) as (world, device),
        ExitStack() as stack,
    ):
        yield Run(config, inputs, world, choose_device(device), stack, at_the_end)


class Run:
    """The parts of one run. Whatever is opened `stack` closes; `at_the_end` this process is alone."""

    def __init__(
        self,
        config: Config,
        inputs: Inputs,
        world: World,
        device: torch.device,
        stack: ExitStack,
        at_the_end: ExitStack,
    ) -> None:
        self._at_the_end = at_the_end
        self.config = replace(config, model=choose_model(config.model, device))
        self.world, self.is_trial = world, inputs.is_trial
        self.clock = Clock(device)
        self._open(inputs, device, stack)
        self._load(device)
        if self._model_source.model is not None:  # who gave it wants it back in one dtype
            stack.callback(join_masters, self.optimizer)
        self._warm_up(stack)

    def _open(self, inputs: Inputs, device: torch.device, stack: ExitStack) -> None:
        """The folder, the checkpoint to go on from, prompts and rewards: all that needs no weights."""
        config = self.config
        self._reference_device = choose_device(config.reference_device) if config.reference_device else device
        _check_settings(config, self.world, device)
        rewards = RewardFunctions(inputs.rewards or config.reward, config.reward_weights)
        folder = stack.enter_context(hold_folder(config)) if self.world.is_main else Path()
        self.folder = Path(self.world.from_main("the choice of a folder", str(folder)))
        is_main = self.world.is_main
        if is_main:
            self.checkpoints, self.checkpoint = open_checkpoints(config, self.folder)
        self.world.exchange("the repair of checkpoints", None)
        if not is_main:
            self.checkpoints, self.checkpoint = open_checkpoints(config, self.folder, repairs=False)
        check_spec(config.prompts if inputs.prompts is None else inputs.prompts)
        self._model_source = inputs.model_source(config)
        self._shape = self._model_source.load_config()
        self.config = config = resolve_max_new_tokens(
            loading.check_quantized(config, self._shape), context_length(self._shape)
        )
        room = loading.room_in(self._shape, self._model_source.load_tokenizer(), config.max_new_tokens)
        with log_if_slow(f"reading prompts from {config.prompts}"):
            self.source = loading.load_source(config, room, inputs.prompts)
        rewards.check(self.source.tasks, self.source.longest(PROMPTS_LOOKED_AT))
        self.engine = start_engine(config, stack) if "policy" in self.source.tasks else None
        self.rewards = rewards.with_engine(self.engine)

    def _load(self, device: torch.device) -> None:
        """The policy, what it is compared with, what samples, and the optimizer."""
        config, world = self.config, self.world
        limit = parse_size(config.memory_limit) if config.memory_limit else None
        self.device = Device(
            device,
            utilization=config.memory_utilization,
            limit_bytes=limit,
            ranks_on_device=world.ranks_on_device,
        )  # before anything is loaded
        target = make_target(self._shape, device, config.precision)
        self.loss_scale = LossScale() if target.dtype == torch.float16 else None
        self._work = Workload(config, target, 1, self._reference_device == device, world.size)
        try:
            with log_if_slow(f"loading {config.model}"):
                self.policy, self.reference = loading.load_models(
                    config,
                    self._model_source,
                    self.checkpoint,
                    target,
                    self._reference_device,
                    self.folder if world.is_main else None,
                )
            if file := config.chat_template:  # which is saved with the model
                self.policy.tokenizer.chat_template = template_text(file, "chat_template")
            if world.is_main and not self.is_trial:
                self.checkpoints.check_saveable(self.policy)
            loading.check_same(world, config, self.checkpoint, self.source, self.policy.model)
            if config.shard:
                loading.shard_models(self.policy, self.reference)
            splits = self._work.splits_masters
            low_bits = split_masters(self.policy.model, target.dtype) if splits else {}
            sampled_in = target.master_dtype if config.shard else target.dtype
            self.sampler = RolloutModel(self.policy.model, sampled_in, fp32_logits=config.fp32_logits)
            if wrong := self.sampler.check():
                raise UserError(f"{config.model!r} cannot be sampled from: {wrong}; give --precision fp32.")
            self.optimizer = make_optimizer(self.policy.model, config, low_bits)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise DoesNotFit(
                f"{explain_model_does_not_fit(self._work, Fit(self.device))} ({reason})"
            ) from error
        if device.type != "cpu":  # of what came before nothing is left: the plan takes it for always held
            gc.collect()
            release_cache()
        loading.say_where_texts_end(self.policy, config)

    def _warm_up(self, stack: ExitStack) -> None:
        """The first plan, by passes of each phase. Then the run has begun, and its folder is filled."""
        world, self.longest_prompt = self.world, longest_prompt(self.source, self.policy.tokenizer)
        work = replace(self._work, longest_prompt=self.longest_prompt)
        with log_if_slow("trying out how many rows fit, at the longest texts"):
            work, self.fit, self.plan = plan_run(
                work, world, self.device, self._phases_of, stack, is_trial=self.is_trial
            )
        self.work, self.config = work, work.config  # auto no more
        config = self.config
        self.measured = Measured()
        if world.is_main:
            if not self.is_trial:
                check_room(
                    config,
                    self.folder,
                    checkpoint_bytes=checkpoint_bytes(self.policy.model, self.optimizer),
                    model_bytes=saved_model_bytes(self.policy.model),
                    num_there=len(self.checkpoints.all()),
                )
            write_settings(self.folder, config)
            stack.enter_context(keep_log(self.folder))
            keep_files(self.folder, config)
            finished = self.checkpoint.state["step"] if self.checkpoint else 0
            log_start(self.folder, self.device.device, finished)
        self.eval_prompts = _choose_eval_prompts(config, self.source)
        self.stays_gathered = config.shard and stays_gathered(world, self.fit, work, self.policy)
        device_type = self.device.device.type
        self.records = not config.shard and records_steps(work.target.model_config, device_type)
        # What decoding leaves for the next rollout, and for the next evaluation, where it records.
        self.arena, self.eval_arena = ArenaCache(), ArenaCache()

    def _phases_of(self, work: Workload) -> PhaseProbe:
        scored = self.reference.model if self.reference and work.scores == "reference" else None
        return PhaseProbe(work, self.policy.model, self.sampler.model, scored)

    def share(self, groups: Sequence[int] | None = None) -> Share:
        """This process's of some of a step's groups, by their numbers; None: of all."""
        num_groups, world = self.config.num_prompts, self.world
        numbers = range(num_groups) if groups is None else groups
        shares = [world.share(num_groups, rank) for rank in range(world.size)]
        mine = [group for group in numbers if group in shares[world.rank]]
        most = max(sum(group in share for group in numbers) for share in shares)
        return Share(mine, self.config.group_size, most - len(mine) if self.config.shard else 0)

    def save(self, step: int, state: dict[str, Any], *, best: bool, last: bool, writes: bool = False) -> bool:
        """A checkpoint, which the first process writes; whether this one has written it.

        last: the run is done, and its model goes to the hub if it is to. writes: this process writes it,
        whichever it is.
        """
        snapshot, is_main = None, self.world.is_main or writes
        if self.is_trial:
            return True  # nothing is wanted
        if self.config.shard:  # here all take part
            snapshot = take_snapshot(self.policy.model, self.optimizer, keep=is_main)
        takes_part = self.reference is not None and (is_main or snapshot is not None)
        reference = self.reference.tensors(keep=is_main) if self.reference and takes_part else None
        if not is_main:
            return False
        try:
            written, _ = survive(
                lambda _: self.checkpoints.save(
                    step,
                    self.policy,
                    self.optimizer,
                    state,
                    reference=reference,
                    best=best,
                    snapshot=snapshot,
                ),
                1,
                phase="checkpoint",
            )
        except DoesNotFit as error:
            logger.warning("no checkpoint of step {}: {}", step, error)
            return False
        if written and last and self.config.push_to_hub:
            # When the others have been let go: an upload may take longer than they wait.
            self._at_the_end.callback(
                push,
                self.checkpoints.to_use or written,
                self.config.push_to_hub,
                private=self.config.hub_private,
                leave_out=ONLY_TO_TRAIN,
            )
        return bool(written)


def show_plans(run: Run, console: Console) -> None:
    """The table of the first process's plan; of the others, how many rows they do at once."""
    console.print(plan_table(run.plan))
    rows = ", ".join(f"{phase} {rows}" for phase, rows in run.fit.planned().items())
    for process, plan in enumerate(run.world.exchange("the plans", f"{rows}; budget {run.plan.budget}")):
        if process:
            logger.info("process {} has rows at once: {}", process, plan)


def _check_settings(config: Config, world: World, device: torch.device) -> None:
    """ValueError for what cannot be, or is not installed; a warning of what is hardly wanted."""
    if config.shard:
        loading.check_shard(config, world)
    check_trackers(config.trackers)
    if config.push_to_hub and world.is_main:
        check_hub(config.push_to_hub)
    check_peft(config)
    check_optimizer(config, device, compute_dtype(config.precision, device))
    if config.engine != "off":
        find_stockfish(config.stockfish_path)
    if config.kl_in_reward and config.advantage_scale == "group":
        logger.warning(
            "kl_in_reward is on, and advantage_scale is group: where a group's rewards are equal, the KL is "
            "all that differs, and is scaled up to any reward's size; give --advantage-scale batch or none."
        )
    is_emulated = config.precision == "bf16" and not multiplies_in_bf16(device)
    if is_emulated or (config.precision == "fp16" and device.type == "cpu"):
        logger.warning(
            "precision is {}, in which this {} does not multiply: its products are emulated, and a step "
            "takes many times as long; give --precision fp32, or leave it auto.",
            config.precision,
            "processor" if device.type == "cpu" else "device",
        )


def start_engine(config: Config, stack: ExitStack) -> EnginePool | None:
    """Stockfish, where it is wanted and there."""
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
    wanted = -(-config.eval_prompts // max(1, len(num_heldout)))  # of each task
    chosen = source.lowest_heldout(wanted)
    if config.eval_interval and not chosen:
        why = f"--heldout-share {config.heldout_share} holds out no prompts"
        if not config.eval_prompts:
            why = "--eval-prompts is 0"
        logger.warning("nothing will be evaluated: {}; give more, or --eval-interval 0", why)
    elif config.eval_interval and len(chosen) < config.eval_prompts:
        few = ", ".join(f"{count} {task}" for task, count in sorted(num_heldout.items()) if count < wanted)
        logger.info(
            "held out are only {} prompts: evaluations use {}, not the {} of --eval-prompts",
            few,
            len(chosen),
            config.eval_prompts,
        )
    return sorted(chosen, key=lambda prompt: prompt.task)
