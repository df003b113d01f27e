"""Recorded steps: what is replayed reads and writes the same tensors, and gives what the step gives."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from conftest import ARCHITECTURES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grpo.rollout.decoder
import grpo.rollout.slots
from grpo.config.groups import SamplingSettings
from grpo.rollout.cuda_graphs import RecordedSteps, recorder_of
from grpo.rollout.decoder import prompt_places, remaining_places
from grpo.rollout.sample import rollout
from grpo.rollout.slots import KeptSlots, Slots
from grpo.rollout.tokens import step_uniforms
from grpo.types import Prompt, Rollout

G = 3


class OperationRecorder:
    """As a CUDA graph does: the same operations on the same tensors, with the numbers Python had then."""

    def __init__(self) -> None:
        self.works = True
        self.recorded = self.replayed = 0
        self.operations = 0
        """Of the last replay."""

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        with _Noted() as noted:
            work()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            self.operations = len(noted.operations)
            for operation, args, kwargs, made in noted.operations:
                again = operation(*args, **kwargs)
                for old, new in zip(_tensors(made), _tensors(again), strict=True):
                    if not _same_place(old, new):
                        old.copy_(new)

        return replay


class _Noted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, made))
        return made


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _same_place(old: torch.Tensor, new: torch.Tensor) -> bool:
    return old.untyped_storage()._cdata == new.untyped_storage()._cdata


T = 120
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ARCHITECTURES)


def _slots(load, recorder: OperationRecorder | None, groups: int = 3, name: str = "gpt2") -> Slots:
    policy = load(name, "fp64")
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[0] = 0  # nothing ends
    return Slots(policy.model, groups, G, SamplingSettings(max_new_tokens=T), ends=(0,), recorder=recorder)


@EVERY_ARCHITECTURE
def test_replayed_tokens_are_what_tokens_are(load, architecture):
    """Across blocks, while groups start over and go elsewhere; places are not the recorded ones."""
    recorder = OperationRecorder()
    plain, replaying = (_slots(load, each, name=architecture) for each in (None, recorder))
    uniforms = torch.rand(3 * G, T, generator=torch.Generator().manual_seed(0))
    for slots in (plain, replaying):
        slots.start([[1, 2, 3], [4, 5], [6]], uniforms, longest_prompt=4)
    for token in range(110):
        if token in (30, 80):
            place = 1 if token == 30 else 0
            for slots in (plain, replaying):
                slots.replace([place], [[7, 8, 9, 10]], uniforms[:G].flip(1))
        if token == 70:
            plain.keep([1, 2])
            fewer = _slots(load, recorder, groups=2, name=architecture)
            fewer.take_over(replaying, [1, 2])
            replaying = fewer
        plain.advance(), replaying.advance()
        for name in ("ids", "lengths", "terminated"):
            assert torch.equal(getattr(replaying, name), getattr(plain, name))
        assert torch.allclose(replaying.logp, plain.logp, atol=1e-12, rtol=0)
    assert plain.lengths.max() == 111 and plain.lengths.min() == 31  # of the one that came at 80
    assert recorder.recorded == 4  # one and two blocks; then of fewer groups: two, and three
    assert recorder.replayed == 2 + 110 - 4  # the first of each slots are compared


def _sample(policy, prompts, *, rows: int, kept: KeptSlots | None = None, step: int = 1) -> Rollout:
    settings = SamplingSettings(max_new_tokens=60)
    uniforms = step_uniforms(len(prompts) * G, 60, seed=0, step=step)
    return rollout(policy.model, policy.tokenizer, prompts, uniforms, settings, rows=rows, kept=kept)


def _assert_same(one: Rollout, other: Rollout) -> None:
    assert torch.equal(one.completion_ids, other.completion_ids)
    assert torch.equal(one.lengths, other.lengths) and torch.equal(one.terminated, other.terminated)
    assert torch.allclose(one.sampler_logp, other.sampler_logp, atol=1e-12, rtol=0)


@pytest.fixture
def recorder(monkeypatch) -> OperationRecorder:
    """As if the model were on CUDA, where few rows leave nobody waiting."""
    made = OperationRecorder()
    monkeypatch.setattr(grpo.rollout.slots, "step_recorder", lambda model: made)
    monkeypatch.setattr(grpo.rollout.decoder, "FEW_ROWS", 1)
    return made


@pytest.fixture
def ending(load):
    """A model whose texts end, some of them late."""
    policy = load("gpt2", "fp64")
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[policy.tokenizer.eos_token_id] *= 0.3
    return policy


@pytest.fixture
def many(prompts) -> list[Prompt]:
    return [Prompt(f"{n}", prompt.text[: 12 + n], {}) for n in range(2) for prompt in prompts]


@pytest.mark.parametrize("rows", [100, 4 * G, 2])
def test_rollouts_of_recorded_tokens_are_the_same(ending, many, rows, request):
    """Groups leave by halves, waiting ones take places, and a group may be split."""
    many = many[:2] if rows < G else many  # a step at a time, in Python
    plain = _sample(ending, many, rows=rows)
    assert rows < G or (len(plain.lengths.unique()) > 4 and plain.lengths.max() > 48)
    recorder = request.getfixturevalue("recorder")
    _assert_same(_sample(ending, many, rows=rows), plain)
    assert recorder.replayed > 3 * recorder.recorded > 0


@pytest.mark.parametrize("rows", [100, 4 * G])
def test_recordings_serve_the_next_rollout(ending, many, rows, request):
    """Of other prompts and uniforms; nothing of the rollout before is left in what comes out."""
    plain = [_sample(ending, some, rows=rows, step=step) for step, some in ((1, many), (2, many[::-1]))]
    recorder, kept = request.getfixturevalue("recorder"), KeptSlots()
    _assert_same(_sample(ending, many, rows=rows, kept=kept), plain[0])
    recorded, held = recorder.recorded, kept.nbytes
    _assert_same(_sample(ending, many[::-1], rows=rows, kept=kept, step=2), plain[1])
    _assert_same(_sample(ending, many, rows=rows, kept=kept), plain[0])
    if rows == 100:  # lengths of the second may need other sizes, or blocks, than the first
        assert recorder.recorded <= recorded + 3 and held > 0
    again = recorder.recorded
    _assert_same(_sample(ending, many, rows=rows, kept=kept), plain[0])
    assert recorder.recorded == again


def test_what_is_kept_is_let_go_of_by_need(ending, many, recorder):
    kept = KeptSlots()
    _sample(ending, many, rows=100, kept=kept)
    held = kept.nbytes
    kept.trim(held)
    assert kept.nbytes == held
    kept.trim(held - 1)
    assert kept.nbytes < held
    _sample(ending, many, rows=100, kept=kept)
    kept.release()
    assert kept.nbytes == 0


@EVERY_ARCHITECTURE
def test_a_token_is_one_launch(load, architecture):
    """Of the plain path's operations none is left outside; the sampler's part alone are some dozens."""
    recorder = OperationRecorder()
    slots = _slots(load, recorder, name=architecture)
    slots.start([[1, 2, 3], [4, 5], [6]], torch.rand(3 * G, T), longest_prompt=4)
    for _ in range(3):
        slots.advance()
    replayed = recorder.replayed
    slots._recorded._replays = {key: lambda: None for key in slots._recorded._replays}  # what is inside
    with _Noted() as outside:
        slots.advance()
    assert outside.operations == [] and replayed == 3 and recorder.operations > 60


def test_places_are_given_up_by_halves_where_steps_are_recorded(monkeypatch):
    assert [remaining_places(64, groups, 8) for groups in (64, 33, 32, 17, 16, 9, 8, 1)] == [
        64, 64, 32, 32, 16, 16, 8, 8,
    ]  # fmt: skip
    assert [remaining_places(8, groups, 8) for groups in (8, 4, 1)] == [8, 8, 8]  # 64 rows are few
    assert [remaining_places(9, groups, 16) for groups in (6, 5, 1)] == [9, 5, 5]


def test_prompts_have_few_widths_on_cuda(load):
    config = load("gpt2").model.config  # 192 positions
    places = [prompt_places(config, tokens, "cuda") for tokens in (1, 64, 65, 150, 192)]
    assert places == [64, 64, 128, 192, 192]
    assert prompt_places(config, 50, "cpu") == 50
    assert prompt_places(load("llama").model.config, 50, "cuda") == 64


class Recording:
    """A recorder of which only what it does is given."""

    def __init__(self, record: Callable[[Callable[[], object]], Callable[[], None]]) -> None:
        self.works, self.record = True, record


class Counter:
    """Counts by itself: what it shows is n, 2 n, 3 n…"""

    def __init__(self, recorder: Recording) -> None:
        self._steps = RecordedSteps(recorder)
        self.count = torch.tensor([0.0, 0.0])

    def __call__(self, by: float = 1.0) -> list[float]:
        self._steps(by, lambda: self.count.add_(by), changed=[self.count], shown=[self.count])
        return self.count.tolist()


def test_a_driver_that_refuses_is_asked_once(logged):
    asked = []

    def refuse(work: Callable[[], object]) -> Callable[[], None]:
        asked.append(1)
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    recorder = Recording(refuse)
    for counter in (Counter(recorder), Counter(recorder)):  # of one rollout and of the next
        assert [counter() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
    assert len(asked) == 1
    assert [line for line in logged if "WARNING decoding goes on without recorded steps" in line] == logged


def test_a_replay_that_shows_something_else_is_not_used(logged):
    counter = Counter(Recording(lambda work: lambda: None))  # launches nothing
    assert [counter() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
    assert len(logged) == 1 and "the first replay gave other tokens" in logged[0]


def test_numbers_that_are_none_are_no_reason_to_stop_recording(logged):
    recorder = OperationRecorder()
    counter = Counter(recorder)
    for _ in range(3):
        assert counter(by=torch.nan) != counter.count.tolist()  # nan is not itself
    assert not logged


def test_what_has_been_recorded_runs_once_for_each_token(logged):
    recorder = OperationRecorder()
    counter = Counter(recorder)
    assert [counter(by) for by in (1, 1, 5, 5, 1)] == [[1, 1], [2, 2], [7, 7], [12, 12], [13, 13]]
    assert (recorder.recorded, recorder.replayed) == (2, 1 + 3) and not logged


def test_out_of_memory_while_recording_is_for_those_who_replay_the_phase():
    def full(work: Callable[[], object]) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        Counter(Recording(full))()


class Graph:
    """torch.cuda.CUDAGraph as far as recording minds it; `fails` says what goes wrong, in turn."""

    fails: ClassVar[list[str]] = []
    left: ClassVar[list[object]] = []

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self._fail = self.fails.pop(0) if self.fails else ""

    def capture_end(self) -> None:
        if self._fail == "end":
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def replay(self) -> None: ...


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Graph]]:
    """What a CUDA device's recorder calls, without the device."""
    Graph.fails, Graph.left = [], []
    zeros = torch.zeros

    def leave_pool(index: int, pool: object) -> None:
        Graph.left.append((index, pool))

    stream = SimpleNamespace(wait_stream=lambda other: None)
    stands_in = {
        "graph_pool_handle": lambda: (0, 1), "Stream": lambda: stream, "CUDAGraph": Graph,
        "current_stream": lambda: stream, "device": lambda device: nullcontext(),
        "stream": lambda stream: nullcontext(), "empty_cache": lambda: Graph.left.append("emptied"),
    }  # fmt: skip
    for name, does in stands_in.items():
        monkeypatch.setattr(torch.cuda, name, does)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", leave_pool, raising=False)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    recorder_of.cache_clear()
    yield Graph
    recorder_of.cache_clear()


CUDA = torch.device("cuda", 0)


def test_a_capture_that_cannot_end_leaves_the_pool(card, logged):
    recorder = recorder_of(CUDA)
    assert recorder is not None and recorder.works and recorder_of(CUDA) is recorder
    card.fails = ["end"]
    assert Counter(recorder)() == [1, 1]
    assert card.left == [(0, (0, 1))] and not recorder.works and len(logged) == 1


def test_a_device_that_records_nothing_decodes_all_the_same(card, logged, load):
    card.fails = ["end"]
    assert recorder_of(CUDA) is None and recorder_of(CUDA) is None
    assert len(logged) == 1 and "without recorded steps" in logged[0]


def test_memory_kept_for_later_is_freed_for_a_recording(card):
    recorder, tried = recorder_of(CUDA), []

    def work() -> None:
        tried.append(1)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    recorder.record(work)
    assert len(tried) == 2 and card.left == ["emptied"]


def test_slots_go_with_their_last_user(load):
    """Their cache is large: nothing that was recorded may hold it until the collector comes."""
    slots = _slots(load, OperationRecorder())
    slots.start([[1, 2]] * 3, torch.rand(3 * G, T), longest_prompt=2)
    for _ in range(3):
        slots.advance()
    gone = weakref.ref(slots)
    gc.disable()
    try:
        del slots
        assert gone() is None
    finally:
        gc.enable()
