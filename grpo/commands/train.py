"""Train a language model with GRPO."""

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from loguru import logger
from rich.console import Console

from grpo.commands import DONE, FAILED, INTERRUPTED, WRONG_USAGE
from grpo.config import Config
from grpo.data.load import check_spec
from grpo.data.reward_files import load_rewards
from grpo.environment import launched_processes
from grpo.errors import UserError
from grpo.files import shown
from grpo.logs.screen import configure_logging, plain_console, shortened

if TYPE_CHECKING:
    from grpo.run.setup import Run
    from grpo.trainer import Trainer


_INTERNAL = "the run ends with a fault of the program's own, not of its use"


@dataclass
class _Stage:
    """How far a run has come, for what is said where an error ends it."""

    go_on: str = "nothing was begun"
    """How to go on from there."""
    is_logged: bool = False
    """Whether the error's traceback is in the run's log already."""


def main(config: Config, _: Console) -> int:
    """Train, and return the exit status. All output is progress, and goes to stderr."""
    process, _size = launched_processes()
    console = plain_console(stderr=True, quiet=process > 0)
    check_spec(config.prompts)
    load_rewards(config.reward, config.reward_weights)
    configure_logging(config.log_level, console, process=process)
    logger.info("loading torch and {}", "the model" if config.model == "auto" else config.model)
    # Imported here and below: a wrong setting need not wait for the large libraries.
    from grpo.memory.recovery import RESERVE_BYTES
    from grpo.run.dry_run import dry_run

    reserve, stage = bytearray(RESERVE_BYTES), _Stage()
    try:
        if config.dry_run:
            dry_run(config, console)
            return DONE
        return _train(config, console, stage)
    except BaseException as error:
        reserve.clear()  # first of all: to say anything takes memory
        status = _status_of(error)
        if status is None and not isinstance(error, Exception):
            raise
        _log_end(error, stage, process)
        return FAILED if status is None else status


def _train(config: Config, console: Console, stage: _Stage) -> int:
    """Open the run, take all steps, and say what came of them; the exit status."""
    from grpo.run.interrupt import stop_on_signal
    from grpo.run.setup import open_run, show_plans
    from grpo.trainer import Trainer

    with stop_on_signal() as stop, open_run(config) as run:
        logger.info("run folder: {}", shown(run.folder))
        show_plans(run, console)
        gc.freeze()  # what set-up made stays: no need to look through it at every collection
        trainer = Trainer(run, console)
        stage.go_on = "nothing was learned yet"
        try:
            trainer.train(stop)
        except Exception as error:
            if _status_of(error) is None:  # while log.txt is still written
                logger.opt(exception=True).error(_INTERNAL)
                stage.is_logged = True
            raise
        finally:
            stage.go_on = run.checkpoints.how_to_go_on()
        console.print(run.measured.table(run.plan.budget))
        if _is_lost(run, trainer, stage.go_on):
            return FAILED
        if trainer.interrupted:
            logger.warning("stopped after step {}; {}", trainer.finished, stage.go_on)
            return INTERRUPTED
        ended = trainer.progress.ended(trainer.finished, run.optimizer.param_groups[0]["lr"])
        logger.info("{}; model and metrics are in {}", ended, shown(run.folder))
        if run.world.is_main:
            console.print(how_to_load(run), highlight=False, soft_wrap=True)  # to be copied
    return DONE


def _expected_ends() -> dict[type[BaseException], int]:
    """The errors that end a run through no fault of the program's, and their exit statuses."""
    from grpo.data.reward_calls import RewardFailed
    from grpo.distributed import ProcessLost
    from grpo.learning.step import Diverged
    from grpo.rewards import EngineError

    return {
        KeyboardInterrupt: INTERRUPTED,
        UserError: WRONG_USAGE,
        EngineError: WRONG_USAGE,
        Diverged: FAILED,
        RewardFailed: FAILED,
        ProcessLost: FAILED,
    }


def _status_of(error: BaseException) -> int | None:
    """The exit status for what ends a run; None for a fault of the program's own."""
    from grpo.memory.recovery import is_out_of_memory

    known = next((status for kind, status in _expected_ends().items() if isinstance(error, kind)), None)
    return FAILED if known is None and is_out_of_memory(error) else known


def _log_end(error: BaseException, stage: _Stage, process: int) -> None:
    """Log why a run ended, and how to go on."""
    from grpo.distributed import ProcessLost
    from grpo.memory.recovery import is_out_of_memory

    reason = shortened(str(error))
    if _status_of(error) is None:
        if not stage.is_logged:
            logger.opt(exception=error).error(_INTERNAL)
        logger.error("{}: {} ({})", type(error).__name__, reason or "no more is known", stage.go_on)
        return
    if not isinstance(error, tuple(_expected_ends())) and is_out_of_memory(error):
        reason = "memory ran out, and not for the rows of a phase: give more, or a smaller model"
    first_is_lost = isinstance(error, ProcessLost) and error.rank == 0
    level = "ERROR" if process == 0 or first_is_lost else "DEBUG"
    logger.log(level, "{} ({})", reason or "stopped at once", stage.go_on)
    logger.opt(exception=error).debug("where it happened")


def how_to_load(run: "Run") -> str:
    """The lines of Python that load the trained model."""
    where = str(shown(run.checkpoints.to_use or run.checkpoints.model))
    needs = " (needs peft)" if run.config.uses_lora else ""
    return (
        f"To use it in transformers{needs}:\n"
        f"    model = AutoModelForCausalLM.from_pretrained({where!r})\n"
        f"    tokenizer = AutoTokenizer.from_pretrained({where!r})"
    )


def _is_lost(run: "Run", trainer: "Trainer", go_on: str) -> bool:
    """Whether the last model is not on the disk; that is said, and what could not be written on the way."""
    unwritten = list(trainer.logs.unwritten)
    unwritten += [f"the checkpoint of step {step}" for step in run.checkpoints.unwritten]
    if unwritten:
        logger.warning("on the way these could not be written: {}", ", ".join(unwritten))
    lost = run.checkpoints.verify(trainer.finished) if run.world.is_main else None
    if lost:
        text = "the model of step {} is not in {}: {}; make room there ({})"
        logger.error(text, trainer.finished, shown(run.folder), lost, go_on)
    return lost is not None
