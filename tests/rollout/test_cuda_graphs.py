"""Recorded steps: what is replayed reads and writes the same tensors, and gives what the step gives."""

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import ARCHITECTURES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo.config.groups import SamplingSettings
from grpo.rollout.cuda_graphs import RecordedSteps, recorder_of
from grpo.rollout.decoder import prompt_places, remaining_places
from grpo.rollout.sample import rollout
from grpo.rollout.slots import KeptSlots, Slots
from grpo.rollout.tokens import step_uniforms
from grpo.types import Prompt, Rollout

G, T = 3, 120


class OperationRecorder:
    """As a CUDA graph does: the same operations on the same tensors, with the numbers Python had then."""

    def __init__(self) -> None:
        self.works, self.recorded, self.replayed = True, 0, 0
        self.operations = 0  # of the last replay

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        with _Noted() as noted:
            work()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            self.operations = len(noted.operations)
            for operation, args, kwargs, made in noted.operations:
                again = operation(*args, **kwargs)
                for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_replayed_tokens_are_what_tokens_are_and_each_is_one_launch(load, architecture):
    """Across blocks, while groups start over and go elsewhere; places are not the recorded ones."""
    policy, recorder = load(architecture, "fp64"), OperationRecorder()
    settings = SamplingSettings(max_new_tokens=T)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[0] = 0  # nothing ends
    plain = Slots(policy.model, 3, G, settings, ends=(0,), recorder=None)
    replaying = Slots(policy.model, 3, G, settings, ends=(0,), recorder=recorder)
    uniforms = torch.rand(3 * G, T, generator=torch.Generator().manual_seed(0))
    for slots in (plain, replaying):
        slots.start([[1, 2, 3], [4, 5], [6]], uniforms, longest_prompt=4)
    for token in range(110):
        if token in (30, 80):
            for slots in (plain, replaying):
                slots.replace([1 if token == 30 else 0], [[7, 8, 9, 10]], uniforms[:G].flip(1))
        if token == 70:
            for slots in (plain, replaying):
                slots.keep([1, 2])
        plain.advance(), replaying.advance()
        for name in ("ids", "lengths", "terminated"):
            assert torch.equal(getattr(replaying, name), getattr(plain, name))
        assert torch.allclose(replaying.logp, plain.logp, atol=1e-12, rtol=0)
    assert plain.lengths.max() == 111 and plain.lengths.min() == 31  # of the one that came at 80
    assert recorder.recorded == 4  # one and two blocks; then of fewer groups: two, and three
    assert recorder.replayed == 4 + 110 - 4  # the first of each are compared
    # Of the plain path's operations none is left outside; the sampler's part alone are some dozens.
    replaying._recorded._replays = {key: lambda: None for key in replaying._recorded._replays}
    with _Noted() as outside:
        replaying.advance()
    assert outside.operations == [] and recorder.operations > 60
    # Their cache is large: nothing that was recorded may hold it until the collector comes.
    gone = weakref.ref(replaying)
    gc.disable()
    try:
        del replaying, slots
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("rows", [100, 4 * G, 2])
def test_rollouts_of_recorded_tokens_are_the_same(load, prompts, rows, monkeypatch):
    """Groups leave by halves, waiting ones take places, and a group may be split.

    Recordings serve the next rollouts, of other prompts and uniforms; nothing of the one before is left.
    """
    many = [Prompt(f"{n}", prompt.text[: 12 + n], {}) for n in range(2) for prompt in prompts]
    policy, settings, orders = load("gpt2", "fp64"), SamplingSettings(max_new_tokens=60), [many, many[::-1]]
    with torch.no_grad():  # texts end, some of them late
        policy.model.get_output_embeddings().weight[policy.tokenizer.eos_token_id] *= 0.3
    if rows < G:
        orders = [many[:2]]  # a step at a time, in Python

    def sample(turn: int, kept: KeptSlots | None = None) -> Rollout:
        uniforms = step_uniforms(len(orders[turn]) * G, 60, seed=0, step=1 + turn)
        return rollout(*policy[:2], orders[turn], uniforms, settings, rows=rows, kept=kept)

    plain, recorder, kept = [sample(turn) for turn in range(len(orders))], OperationRecorder(), KeptSlots()
    assert rows < G or (len(plain[0].lengths.unique()) > 4 and plain[0].lengths.max() > 48)
    # As if the model were on CUDA, where few rows leave nobody waiting.
    monkeypatch.setattr("grpo.rollout.slots.step_recorder", lambda model: recorder)
    monkeypatch.setattr("grpo.rollout.decoder.FEW_ROWS", 1)

    def check(turn: int = 0, kept: KeptSlots | None = None) -> None:
        again = sample(turn, kept)
        for name in ("completion_ids", "lengths", "terminated"):
            assert torch.equal(getattr(again, name), getattr(plain[turn], name))
        assert torch.allclose(again.sampler_logp, plain[turn].sampler_logp, atol=1e-12, rtol=0)

    check()
    assert recorder.replayed > 3 * recorder.recorded > 0
    if rows < G:
        return
    counts = []
    for turn in (0, 1, 0, 0):
        check(turn, kept)
        counts.append(recorder.recorded)
    assert counts[3] == counts[2]
    if rows == 100:  # lengths of the second may need other sizes, or blocks, than the first
        assert counts[2] <= counts[0] + 3
        held = kept.nbytes
        for room in (held, held - 1):  # they are let go of by need
            kept.trim(room)
            assert (kept.nbytes == held) == (room == held)
        sample(0, kept)
        kept.release()
        assert kept.nbytes == 0


def test_places_are_given_up_by_halves_and_prompts_have_few_widths_where_steps_are_recorded(load):
    assert [remaining_places(64, groups, 8) for groups in (64, 33, 32, 17, 16, 9, 8, 1)] == [
        64, 64, 32, 32, 16, 16, 8, 8,
    ]  # fmt: skip
    assert [remaining_places(8, groups, 8) for groups in (8, 4, 1)] == [8, 8, 8]  # 64 rows are few
    assert [remaining_places(9, groups, 16) for groups in (6, 5, 1)] == [9, 5, 5]
    config = load("gpt2").model.config  # 192 positions
    places = [prompt_places(config, tokens, "cuda") for tokens in (1, 64, 65, 150, 192)]
    assert places == [64, 64, 128, 192, 192]
    assert prompt_places(config, 50, "cpu") == 50
    assert prompt_places(load("llama").model.config, 50, "cuda") == 64


class Counter:
    """Counts by itself: what it shows is n, 2 n, 3 n…"""

    def __init__(self, recorder: Any) -> None:
        self._steps, self.count = RecordedSteps(recorder), torch.zeros(2)

    def __call__(self, by: float = 1.0) -> list[float]:
        self._steps(by, lambda: self.count.add_(by), changed=[self.count], shown=[self.count])
        return self.count.tolist()


def test_what_has_been_recorded_runs_once_for_each_token(logged):
    counter = Counter(recorder := OperationRecorder())
    assert [counter(by) for by in (1, 1, 5, 5, 1)] == [[1, 1], [2, 2], [7, 7], [12, 12], [13, 13]]
    assert (recorder.recorded, recorder.replayed) == (2, 2 + 3)
    counter = Counter(OperationRecorder())
    for _ in range(3):  # numbers that are none are no reason to stop
        assert counter(by=torch.nan) != counter.count.tolist()  # nan is not itself
    assert not logged


def test_a_driver_that_refuses_is_asked_once_and_a_replay_that_shows_something_else_is_not_used(logged):
    refuses = RuntimeError("CUDA error: operation not permitted when stream is capturing")
    driver = mock.Mock(works=True, **{"record.side_effect": refuses})
    for counter in (Counter(driver), Counter(driver)):  # of one rollout and of the next
        assert [counter() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
    assert driver.record.call_count == len(logged) == 1
    assert "WARNING decoding goes on without recorded steps" in logged[0]
    counter = Counter(mock.Mock(works=True))  # launches nothing
    assert [counter() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]
    assert len(logged) == 2 and "the first replay gave other tokens" in logged[1]
    driver = mock.Mock(works=True, **{"record.side_effect": torch.OutOfMemoryError})
    with pytest.raises(torch.OutOfMemoryError):  # which is for those who replay the phase
        Counter(driver)()


def test_a_capture_that_fails_leaves_the_pool_and_memory_kept_for_later_is_freed_for_one(monkeypatch, logged):
    """By what a CUDA device's recorder calls, without the device."""
    device = torch.device("cpu", 0)  # whose tensors are here
    cuda, leaves_pool = mock.MagicMock(), mock.Mock()
    cuda.graph_pool_handle.return_value, ends = (0, 1), cuda.CUDAGraph.return_value.capture_end
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", leaves_pool, raising=False)
    recorder_of.cache_clear()
    try:
        ends.side_effect = RuntimeError("CUDA error: operation failed due to a previous error during capture")
        assert recorder_of(device) is recorder_of(device) is None  # a device that records nothing
        assert len(logged) == 1 and "without recorded steps" in logged[0]
        recorder_of.cache_clear()
        ends.side_effect = None
        recorder = recorder_of(device)
        assert recorder is not None and recorder.works and recorder_of(device) is recorder
        leaves_pool.reset_mock()
        work = mock.Mock(side_effect=[torch.OutOfMemoryError, None])
        recorder.record(work)
        assert work.call_count == 2 and cuda.empty_cache.call_count == 1 and not leaves_pool.called
        ends.side_effect = RuntimeError("the same again")
        assert Counter(recorder)() == [1, 1] and not recorder.works
        leaves_pool.assert_called_once_with(0, (0, 1))
        assert cuda.empty_cache.call_count == 1 and len(logged) == 2
    finally:
        recorder_of.cache_clear()
