"""Where a run's prompts come from next, in an order that a seed fixes and a checkpoint resumes.

Each task has a lane of its own: its rows, each once an epoch, shuffled by (seed, task, epoch). A
source deals from its lanes in turn, so that the mix is even in every step and changing the share
changes no lane's order.
"""

import hashlib
import heapq
import math
import random
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from grpo.prompt import Prompt

CHESS_COLUMNS = ("task", "fen", "moves", "evals", "action", "history")


class ByNumber(Protocol):
    """Prompts, in memory or made when they are asked for."""

    def __getitem__(self, number: int, /) -> Prompt: ...


class Lane:
    """One task's prompts, each once an epoch, in a new order every epoch, without an end.

    numbers: those among `prompts` that are this task's. lengths: characters of each.
    """

    def __init__(
        self, prompts: ByNumber, numbers: Sequence[int], lengths: Sequence[int], *, seed: int, task: str
    ) -> None:
        assert len(numbers) == len(lengths) > 0
        self._prompts, self._numbers, self._lengths = prompts, numbers, lengths
        self._seed = f"{seed} {task}"
        self._position: int
        self._begin(0)

    def take(self) -> Prompt:
        prompt = self._prompts[self._numbers[self._order[self._position]]]
        self._position += 1
        if self._position == len(self._order):
            self._begin(self._epoch + 1)
        return prompt

    def longest(self, count: int) -> list[Prompt]:
        """Those of most characters."""
        places = heapq.nlargest(count, range(len(self._lengths)), key=self._lengths.__getitem__)
        return [self._prompts[self._numbers[place]] for place in places]

    def state(self) -> dict[str, int]:
        return {"epoch": self._epoch, "position": self._position}

    def restore(self, state: dict[str, int]) -> None:
        self._begin(state["epoch"])
        self._position = state["position"]

    def _begin(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._order = shuffled(len(self._numbers), f"{self._seed} {epoch}")


class PromptSource:
    """The prompts of a run: `draw` the next ones for training, `heldout` for evaluation.

    The two have no position in common. With lanes for both chess tasks, `policy_share` of the
    prompts are policy prompts, spread evenly; with one lane it plays no part.
    """

    def __init__(
        self,
        lanes: dict[str, Lane],
        heldout: list[Prompt],
        *,
        seed: int,
        policy_share: float,
        rows_digest: str,
    ) -> None:
        self.heldout = heldout
        self._lanes = lanes
        self._seed = seed
        self._policy_share = policy_share
        self._rows_digest = rows_digest
        self._num_drawn = 0

    @property
    def tasks(self) -> set[str]:
        """The tasks that draws come from."""
        if len(self._lanes) == 1:
            return set(self._lanes)
        return {
            task
            for task, share in (("policy", self._policy_share), ("environment", 1 - self._policy_share))
            if share
        }

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        return [self._take() for _ in range(count)]

    def longest(self, count: int) -> list[Prompt]:
        """The prompts with the most characters, `count` of each lane."""
        return [prompt for lane in self._lanes.values() for prompt in lane.longest(count)]

    def state(self) -> dict[str, Any]:
        """Where the next draw begins, as JSON: per task the epoch, and the place in its order."""
        return {
            "seed": self._seed,
            "rows_digest": self._rows_digest,
            "num_drawn": self._num_drawn,
            "lanes": {task: lane.state() for task, lane in self._lanes.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. ValueError if that was with other rows or another seed."""
        if any("row" in lane for lane in state["lanes"].values()):  # which says where a block began
            raise ValueError(
                "the checkpoint is of a run that streamed its prompts from the hub, in an order that is not "
                "made any more: start a new run from its weights, with its folder as --model"
            )
        if state["seed"] != self._seed:
            raise ValueError(f"the checkpoint drew its prompts with seed {state['seed']}, not {self._seed}")
        if state["rows_digest"] != self._rows_digest:
            raise ValueError(
                "the training prompts are not those of the checkpoint: resume with the same --prompts, "
                "prompt settings and --max-new-tokens, or start a new run from the checkpoint's weights with "
                "--model"
            )
        for task, lane in self._lanes.items():
            lane.restore(state["lanes"][task])
        self._num_drawn = state["num_drawn"]

    def _take(self) -> Prompt:
        before, after = (math.floor(n * self._policy_share) for n in (self._num_drawn, self._num_drawn + 1))
        task = "policy" if after > before else "environment"
        if len(self._lanes) == 1:
            (task,) = self._lanes
        prompt = self._lanes[task].take()
        self._num_drawn += 1
        return prompt


def collate(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """Columns of a batch as rewards take them: one list a name, None where a prompt has no value.

    A batch with chess prompts has all chess columns, whichever tasks happen to be in it.
    """
    names = dict.fromkeys(CHESS_COLUMNS if any(prompt.task != "custom" for prompt in prompts) else ())
    names.update(dict.fromkeys(name for prompt in prompts for name in prompt.columns))
    return {name: [prompt.columns.get(name) for prompt in prompts] for name in names}


def digest(prompts: Iterable[Prompt]) -> str:
    """Tells two sets of prompts apart."""
    total = hashlib.sha256()
    for prompt in prompts:
        total.update(f"{prompt.id}\0{prompt.text}\0".encode(errors="surrogatepass"))
    return total.hexdigest()[:16]


def shuffled(count: int, seed: str) -> Sequence[int]:
    """The numbers below `count` in an order that is the same on every machine, in 8 bytes each."""
    order = array("q", range(count))
    random.Random(seed).shuffle(order)
    return order
