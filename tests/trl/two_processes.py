"""Run by torchrun: the same steps in two processes, the second with memory for a group at a time."""

import sys
from pathlib import Path

import torch
from benchmarks.trl_cases import GROUP, Case, Ours, run

CASES = Case("dapo", "token", 0.04, 1, 2), Case("grpo", "sequence", 0.04, 2, 1)


def little_memory(trainer) -> None:
    """Passes of more than a group run out of memory."""
    if trainer.accelerator.process_index == 0:
        return

    def forward(module, given, named):
        if len(named["input_ids"]) > GROUP:
            raise torch.OutOfMemoryError("CUDA out of memory")

    trainer.model.register_forward_pre_hook(forward, with_kwargs=True)
    trainer.fit.plan = lambda phase, batch_size, tokens=1: batch_size  # until it runs out


if __name__ == "__main__":
    done = [run(Ours, case, prepare=little_memory, processes=2) for case in CASES]
    torch.save(done, Path(sys.argv[1]) / f"{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()
