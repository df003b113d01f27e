"""The source of a run's prompts, in an order that a seed fixes and a checkpoint resumes.

Each task has a lane of its own: its rows, each once an epoch, shuffled by (seed, task, epoch). A
source deals from its lanes in turn, so that the mix is even in every step and changing the share
changes no lane's order.
"""

import hashlib
import heapq
import math
import random
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import chess

from grpo.errors import UserError
from grpo.prompt import Prompt

HELDOUT_SHARE = 0.05
CHESS_COLUMNS = ("task", "fen", "moves", "evals", "action", "history")


class TaskQueue:
    """One task's prompts, each once an epoch, in a new order every epoch, without an end.

    Of each prompt its number among all is kept, and how many characters it has.
    """

    def __init__(self, seed: str) -> None:
        self.numbers, self.lengths = array("q"), array("q")
        self._seed, self._epoch, self._position = seed, 0, 0
        self._order = array("q")  # of the epoch, from its first draw on

    def take(self) -> int:
        """Returns the number of the next prompt."""
        if not self._order:
            self._order = array("q", range(len(self.numbers)))  # in 8 bytes each
            random.Random(f"{self._seed} {self._epoch}").shuffle(self._order)
        number = self.numbers[self._order[self._position]]
        self._position += 1
        if self._position == len(self._order):
            self.restore({"epoch": self._epoch + 1, "position": 0})
        return number

    def longest(self, count: int) -> list[int]:
        """Numbers of the prompts with the most characters."""
        places = heapq.nlargest(count, range(len(self.lengths)), key=self.lengths.__getitem__)
        return [self.numbers[place] for place in places]

    def state(self) -> dict[str, int]:
        return {"epoch": self._epoch, "position": self._position}

    def restore(self, state: dict[str, int]) -> None:
        self._epoch, self._position, self._order = state["epoch"], state["position"], array("q")


class PromptSource:
    """The prompts of a run: `draw` the next ones for training, `heldout` for evaluation.

    It is filled once, by `add`; `prompt_of` gives the prompt of a number again. Training and evaluation have
    no position in common. With lanes for both chess tasks, `policy_share` of the prompts are policy prompts,
    spread evenly; with one lane it plays no part.
    """

    def __init__(
        self,
        prompt_of: Callable[[int], Prompt],
        *,
        seed: int,
        heldout_share: float = 0.0,
        heldout_count: int = 0,
    ) -> None:
        self.lanes: dict[str, TaskQueue] = {}
        self.policy_share = 0.5
        self._prompt_of, self._seed = prompt_of, seed
        self._heldout_share, self._heldout_count = heldout_share, heldout_count
        self._heldout: dict[str, list[tuple[float, int, Prompt]]] = {}
        self._digest = hashlib.sha256()
        self._num_drawn = 0

    def add(self, number: int, prompt: Prompt) -> None:
        """Adds a prompt to those to train on, or to those held out, by its position."""
        fraction = heldout_fraction(prompt) if self._heldout_share else 1.0
        if fraction < self._heldout_share:
            heap = self._heldout.setdefault(
                prompt.task, []
            )  # of the lowest fractions; the highest comes first
            heapq.heappush(heap, (-fraction, -number, prompt))
            if len(heap) > self._heldout_count:
                heapq.heappop(heap)
            return
        if prompt.task not in self.lanes:
            self.lanes[prompt.task] = TaskQueue(f"{self._seed} {prompt.task}")
        lane = self.lanes[prompt.task]
        lane.numbers.append(number)
        lane.lengths.append(len(prompt.text))
        self._digest.update(_identity(prompt))

    @property
    def heldout(self) -> list[Prompt]:
        """At most `heldout_count` of each task; the others are not trained on either."""
        return self.lowest_heldout(self._heldout_count)

    def lowest_heldout(self, count: int) -> list[Prompt]:
        """`count` of each task, in the order they came; which ones depends on neither seed nor order."""
        entries = [entry for heap in self._heldout.values() for entry in heapq.nlargest(count, heap)]
        return [prompt for _, _, prompt in sorted(entries, key=lambda entry: -entry[1])]

    @property
    def tasks(self) -> set[str]:
        """The tasks that draws come from."""
        if len(self.lanes) == 1:
            return set(self.lanes)
        shares = {"policy": self.policy_share, "environment": 1 - self.policy_share}
        return {task for task, share in shares.items() if share}

    def draw(self, count: int) -> list[Prompt]:
        """Returns the next `count` prompts."""
        return [self._draw_one() for _ in range(count)]

    def _draw_one(self) -> Prompt:
        before, after = (math.floor(n * self.policy_share) for n in (self._num_drawn, self._num_drawn + 1))
        task = "policy" if after > before else "environment"
        if len(self.lanes) == 1:
            (task,) = self.lanes
        self._num_drawn += 1
        return self._prompt_of(self.lanes[task].take())

    def longest(self, count: int) -> list[Prompt]:
        """The prompts with the most characters, `count` of each lane."""
        return [self._prompt_of(number) for lane in self.lanes.values() for number in lane.longest(count)]

    def state(self) -> dict[str, Any]:
        """Returns the place where the next draw begins, as JSON: per task the epoch, and the place in its
        order."""
        return {
            "seed": self._seed,
            "rows_digest": _shown(self._digest),
            "num_drawn": self._num_drawn,
            "lanes": {task: lane.state() for task, lane in self.lanes.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. ValueError if that was with other rows or another seed."""
        if any("row" in lane for lane in state["lanes"].values()):  # which says where a block began
            raise UserError(
                "the checkpoint is of a run that streamed its prompts from the hub, in an order that is not "
                "made any more: start a new run from its weights, with its folder as --model"
            )
        if state["seed"] != self._seed:
            raise UserError(f"the checkpoint drew its prompts with seed {state['seed']}, not {self._seed}")
        if state["rows_digest"] != _shown(self._digest):
            raise UserError(
                "the training prompts are not those of the checkpoint: resume with the same --prompts, "
                "prompt settings and --max-new-tokens, or start a new run from the checkpoint's weights with "
                "--model"
            )
        for task, lane in self.lanes.items():
            lane.restore(state["lanes"][task])
        self._num_drawn = state["num_drawn"]


# Which side of the held-out split a position is on: a property of the position, not of the data.
def heldout_fraction(prompt: Prompt) -> float:
    """Returns the number in [0, 1] that the prompt's position hashes to."""
    key = position(prompt).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.sha256(key).digest()[:8]) / 2**64


def position(prompt: Prompt) -> str:
    """The first four fields of the prompt's FEN, or its text where it has none."""
    fen = prompt.columns.get("fen")
    if not isinstance(fen, str) or not fen.strip():
        return prompt.lasting_text
    if fen.split()[3:4] != ["-"]:  # an en-passant square that nobody can use: some tools leave it out
        with suppress(ValueError):
            fen = chess.Board(fen).fen()
    return " ".join(fen.split()[:4])


def collate(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """Returns a batch's columns as rewards take them: one list a name, None where a prompt has no value.

    A batch with chess prompts has all chess columns, whichever tasks happen to be in it.
    """
    names = dict.fromkeys(CHESS_COLUMNS if any(prompt.task != "custom" for prompt in prompts) else ())
    names.update(dict.fromkeys(name for prompt in prompts for name in prompt.columns))
    return {name: [prompt.columns.get(name) for prompt in prompts] for name in names}


def digest(prompts: Iterable[Prompt]) -> str:
    """Returns a digest by which two sets of prompts are told apart."""
    return _shown(hashlib.sha256(b"".join(map(_identity, prompts))))


def _identity(prompt: Prompt) -> bytes:
    return f"{prompt.id}\0{prompt.lasting_text}\0".encode(errors="surrogatepass")


def _shown(digest: Any) -> str:
    return digest.hexdigest()[:16]
