"""The processes of a run: who they are, what they tell each other, how one that is lost shows.

The model is never wrapped. Each process samples, scores and learns its own groups, and retries by itself;
in between, small things (rewards, counts, metrics) are exchanged, each with each, so that whoever waits can
say for whom, and a step's gradients are summed once, in buckets, by torch.distributed. To have come to an
exchange is a process's vote that all before it went well.

Launchers (accelerate launch, torchrun, mpirun) start the processes; accelerate finds their places.
"""

from grpo.distributed.launch import open_world
from grpo.distributed.world import ProcessLost, World, largest_share, sum_of_bits

__all__ = ["ProcessLost", "World", "largest_share", "open_world", "sum_of_bits"]
