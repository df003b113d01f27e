"""Trials of the leak watch on real leaks, in a small training loop on the host."""

import gc
import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from grpo.memory.leaks.leak import LeakVerdict, LeakWatch

LEAKS = ("logits", "activations", "cycle", "tensors", "arrays")
LEAK_STEPS, CLEAN_STEPS = 200, 500
_WIDTH, _VOCABULARY, _ROWS, _LENGTH = 64, 256, 8, 16


class TinyModel(nn.Module):
    """Embedding, two layers, head: 0.13 MB of logits a step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(2))
        self.widen = nn.Linear(_WIDTH, _VOCABULARY)
        self.head = nn.Linear(_VOCABULARY, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)  # (N, T, width)
        for layer in self.layers:
            hidden = hidden + torch.relu(layer(hidden))
        wide = self.widen(hidden)  # makes activations
        return self.head(torch.relu(wide))  # makes logits


class Cycle:
    """Refers to itself, so that only the garbage collector would free it."""

    def __init__(self, logits: Tensor) -> None:
        self.itself = self
        self.copy = logits.clone()  # makes cycle


class Leaks:
    """Functions that leak after a step; `none` does nothing."""

    def __init__(self, model: TinyModel) -> None:
        self.model = model
        self.kept: list[Tensor] = []
        self.cache: dict[int, Tensor | np.ndarray] = {}

    def logits(self, step: int, logits: Tensor) -> None:
        self.kept.append(logits)

    def activations(self, step: int, logits: Tensor) -> None:
        if step == 0:
            self.model.widen.register_forward_hook(lambda _, inputs, output: self.kept.append(output))

    def cycle(self, step: int, logits: Tensor) -> None:
        gc.disable()
        Cycle(logits.detach())

    def tensors(self, step: int, logits: Tensor) -> None:
        self.cache[step] = torch.zeros(1000 * step)  # makes tensors

    def arrays(self, step: int, logits: Tensor) -> None:
        self.cache[step] = np.ones(_VOCABULARY * _ROWS * _LENGTH // 2)  # makes arrays

    def none(self, step: int, logits: Tensor) -> None:
        pass


@dataclass(frozen=True)
class Trial:
    """found: the verdict is a leak of the right kind; named: its first culprit is at the right line."""

    verdict: str
    found: bool
    named: bool


def run_trial(leak: str, seed: int, steps: int) -> Trial:
    """Train with a leak in a process of its own: memory that another trial has freed would hide growth."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        torch.set_num_threads(1)  # threads do not survive a fork
        sender.send(train(leak, seed, steps))

    process = context.Process(target=work)
    process.start()
    sender.close()  # so that a process that dies is an EOFError here
    verdict: LeakVerdict = receiver.recv()
    process.join()
    kind = "not torch" if leak == "arrays" else "held tensors"
    site = verdict.culprits[0].site if verdict.culprits else None
    named = site is not None and site.endswith(f"{Path(__file__).name}:{line_of(leak)}")
    return Trial(str(verdict), verdict.kinds == (kind,), named)


def train(leak: str, seed: int, steps: int) -> LeakVerdict:
    """The verdict over a run of the small model."""
    torch.manual_seed(seed)
    model = TinyModel()
    optimizer = torch.optim.AdamW(model.parameters())
    after_step: Any = getattr(Leaks(model), leak)
    gc.collect()
    gc.freeze()
    with LeakWatch(torch.device("cpu")) as watch:
        for step in range(steps):
            tokens = torch.randint(_VOCABULARY, (_ROWS, _LENGTH))
            logits = model(tokens)
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            after_step(step, logits)
            watch.sample(step)
        return watch.verdict()


def line_of(leak: str) -> int:
    """The line of this file that makes what the leak keeps, by its comment."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# makes {leak}"))
