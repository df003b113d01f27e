"""Whether the processes of a run are about to do the same."""

from dataclasses import fields

from transformers import PreTrainedModel

from grpo.config import Config, SettingsError, to_plain
from grpo.config.settings import MemorySettings
from grpo.data import PromptSource
from grpo.distributed import World, sum_of_bits
from grpo.run.checkpoint import Checkpoint

_OF_THIS_MACHINE = {
    *("device", "reference_device", "stockfish_path", "num_engines", "runs_dir", "name", "resume"),
    *(item.name for item in fields(MemorySettings)),
}
"""Settings in which processes may differ."""


def check_same(
    world: World, config: Config, checkpoint: Checkpoint | None, source: PromptSource, model: PreTrainedModel
) -> None:
    """SettingsError unless all processes train the same model on the same prompts in the same way."""
    if world.size == 1:
        return
    of_this_machine = _OF_THIS_MACHINE - ({"memory_limit"} if config.shard else set())
    settings = {name: value for name, value in to_plain(config).items() if name not in of_this_machine}
    mine = settings | {
        "the checkpoint to go on from": checkpoint.folder.name if checkpoint else None,
        "the prompts (a digest)": source.state()["rows_digest"],
        "the model (a sum of its bits)": sum(map(sum_of_bits, model.parameters())),
    }
    for rank, theirs in enumerate(world.exchange("the comparison of settings", mine)):
        for what, value in theirs.items():
            if value != mine[what]:
                raise SettingsError(
                    f"process {rank} has {value} for {what}, process {world.rank} {mine[what]}: give all "
                    "machines the same command, files and versions, and --resume a folder that all see."
                )
