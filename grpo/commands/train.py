"""Train a language model with GRPO."""

import gc
import io
import os
import sys
from contextlib import nullcontext, redirect_stderr
from typing import TYPE_CHECKING

from grpo.files import shown

if TYPE_CHECKING:
    from grpo.run.setup import Run
    from grpo.trainer import Trainer

DONE, FAILED, WRONG_SETTING, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses."""


def main() -> int:
    """Run the command line."""
    from grpo.environment import launched_processes

    process, _ = launched_processes()
    # Imported step by step: a wrong setting need not wait for the large libraries.
    from loguru import logger

    from grpo.commands.screen import print_error, screen, shortened
    from grpo.config import parse_command_line
    from grpo.data.beforehand import check_beforehand
    from grpo.run.screen import configure_logging

    console = screen(stderr=True, quiet=process > 0)  # one of several processes speaks for all
    try:
        with redirect_stderr(io.StringIO()) if process else nullcontext():
            config = parse_command_line()
        check_beforehand(config)
    except ValueError as error:
        print_error(console, error)
        return WRONG_SETTING
    configure_logging(config.log_level, console, process=process)
    complain = logger.debug if process else logger.error
    go_on, began = "nothing was begun", False
    logger.info("loading torch and {}", "the model" if config.model == "auto" else config.model)

    from grpo.data.reward_calls import RewardFailed
    from grpo.distributed import ProcessLost
    from grpo.learning.step import Diverged
    from grpo.memory.recovery import Reserve, is_out_of_memory
    from grpo.run.dry_run import dry_run
    from grpo.run.interrupt import stop_on_signal
    from grpo.run.setup import open_run, show_plans
    from grpo.trainer import Trainer
    from rewards.engine import EngineError

    reserve = Reserve()
    try:
        if config.dry_run:
            dry_run(config, console)
            return DONE
        with stop_on_signal() as stop, open_run(config) as run:
            logger.info("run folder: {}", shown(run.folder))
            show_plans(run, console)
            gc.freeze()  # what set-up made stays: no need to look through it at every collection
            trainer = Trainer(run, console)
            began = True
            go_on = "nothing was learned yet"
            try:
                trainer.train(stop)
            finally:
                go_on = run.checkpoints.how_to_go_on()
            console.print(run.measured.table(run.plan.budget))
            if _is_lost(run, trainer, go_on):
                return FAILED
            if trainer.interrupted:
                logger.warning("stopped after step {}; {}", trainer.finished, go_on)
                return INTERRUPTED
            ended = trainer.progress.ended(trainer.finished, run.optimizer.param_groups[0]["lr"])
            logger.info("{}; model and metrics are in {}", ended, shown(run.folder))
            if run.world.is_main:
                console.print(how_to_load(run), highlight=False, soft_wrap=True)  # to be copied
    except KeyboardInterrupt:
        complain("stopped at once; {}", go_on)
        return INTERRUPTED
    except (ValueError, EngineError) as error:
        reserve.let_go()
        complain("{} ({})" if began else "{}", shortened(error), go_on)
        logger.opt(exception=True).debug("where it happened")
        return WRONG_SETTING
    except (Diverged, RewardFailed) as error:
        complain("{} ({})", shortened(error), go_on)
        logger.opt(exception=True).debug("where it happened")
        return FAILED
    except ProcessLost as error:
        (logger.error if error.rank == 0 else complain)("{} ({})", error, go_on)
        if error.rank == 0:  # a call to it may still wait in a thread, which an ordinary end would abort
            sys.stderr.flush()
            os._exit(FAILED)
        return FAILED
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reserve.let_go()
        complain("memory ran out, and not for the rows of a phase: give more, or a smaller model ({})", go_on)
        return FAILED
    return DONE


def how_to_load(run: "Run") -> str:
    """For whoever wants to use the model."""
    where = str(shown(run.checkpoints.to_use or run.checkpoints.model))
    needs = " (needs peft)" if run.config.lora.on else ""
    return (
        f"To use it in transformers{needs}:\n"
        f"    model = AutoModelForCausalLM.from_pretrained({where!r})\n"
        f"    tokenizer = AutoTokenizer.from_pretrained({where!r})"
    )


def _is_lost(run: "Run", trainer: "Trainer", go_on: str) -> bool:
    """Whether the last model is not on the disk; that is said, and what could not be written on the way."""
    from loguru import logger

    unwritten = [*trainer.tracker.unwritten] if trainer.tracker else []
    unwritten += [f"the checkpoint of step {step}" for step in run.checkpoints.unwritten]
    if unwritten:
        logger.warning("on the way these could not be written: {}", ", ".join(unwritten))
    lost = run.checkpoints.damage(trainer.finished) if run.world.is_main else None
    if lost:
        text = "the model of step {} is not in {}: {}; make room there ({})"
        logger.error(text, trainer.finished, shown(run.folder), lost, go_on)
    return lost is not None
