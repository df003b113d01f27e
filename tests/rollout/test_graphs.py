"""Recorded steps: what is replayed reads and writes the same tensors, and gives what the step gives."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import ARCHITECTURES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from whole_runs import train

from grpo import phases as planned
from grpo.config.groups import SamplingSettings
from grpo.rollout.arena import Arena
from grpo.rollout.decoder import ArenaCache, padded_prompt_length
from grpo.rollout.graphs import graphs_of, is_repeated, warm_up_and_capture
from grpo.rollout.room import DecodeCapacity
from grpo.rollout.sample import rollout
from grpo.rollout.tables import halved
from grpo.rollout.tokens import step_uniforms
from grpo.types import Batch, Prompt

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
def test_replayed_tokens_are_what_tokens_are_and_each_is_one_launch(load, architecture, monkeypatch):
    """Across pages, while rows leave and others begin; places are not the recorded ones."""
    monkeypatch.setattr("grpo.rollout.tables.FEW_ROWS", 1)
    policy, recorder = load(architecture, "fp64"), OperationRecorder()
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[0] = 0  # nothing ends
    room = DecodeCapacity.of(12, 5, 4, 4, T, ends=(0,), page=64)
    plain, replaying = arenas = Arena(policy.model, room), Arena(policy.model, room, recorder)
    uniforms = torch.rand(12, T, generator=torch.Generator().manual_seed(0))
    for arena in arenas:
        arena.reset(SamplingSettings(max_new_tokens=T))
        arena.encode({0: [1, 2, 3], 1: [4, 5], 2: [6]})
        arena.begin({row: row // 4 for row in range(12)}, uniforms)
    for token in range(110):
        for arena in arenas:
            if token in (30, 80):
                arena.leave([1] if token == 30 else [0, 2])
                arena.encode({3 + (token == 80): [7, 8, 9, 10]})
                arena.begin({20 + token: 3 + (token == 80)}, uniforms[:1].flip(1))
            if token == 70:
                arena.leave(
                    [p for p, slot in enumerate(arena.slots) if slot.group == 2 or slot.row in (5, 6)]
                )
                arena.forget([2])
                arena.close_gaps()
            arena.add_pages([slot for slot in arena.slots if arena.lacks_page(slot, 1)])
            arena.decode_step()
        theirs, ours = (arena.sampled(range(len(arena.slots))) for arena in arenas)
        assert [slot.row for slot in plain.slots] == [slot.row for slot in replaying.slots]
        for name in ("ids", "lengths", "terminated"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))
        assert torch.allclose(ours.logp, theirs.logp, atol=1e-12, rtol=0)
    assert theirs.lengths.max() == 111 and theirs.lengths.min() == 31  # of the one that came at 80
    # Of 12 rows with a page each: 48 and 64 tokens; with two, as their pages grow more; of fewer rows.
    assert recorder.recorded < 8
    assert recorder.replayed == 110  # the first of each are compared
    # Of the plain path's operations none is left outside; the sampler's part alone are some dozens.
    replaying._replays = dict.fromkeys(replaying._replays, lambda: None)
    with _Noted() as outside:
        replaying.decode_step()
    assert outside.operations == [] and recorder.operations > 60
    # Their cache is large: nothing that was recorded may hold it until the collector comes.
    gone = weakref.ref(replaying)
    gc.disable()
    try:
        del replaying, arenas, arena
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

    def sample(turn: int, reusable: ArenaCache | None = None) -> Batch:
        uniforms = step_uniforms(len(orders[turn]) * G, 60, seed=0, step=1 + turn)
        return rollout(*policy[:2], orders[turn], uniforms, settings, rows=rows, reusable=reusable)

    plain, recorder, reusable = (
        [sample(turn) for turn in range(len(orders))],
        OperationRecorder(),
        ArenaCache(),
    )
    assert rows < G or (len(plain[0].lengths.unique()) > 4 and plain[0].lengths.max() > 48)
    # As if the model were on CUDA, where few rows leave nobody waiting.
    monkeypatch.setattr("grpo.rollout.decoder.step_graphs", lambda model: recorder)
    monkeypatch.setattr("grpo.rollout.tables.FEW_ROWS", 1)

    def check(turn: int = 0, reusable: ArenaCache | None = None) -> None:
        again = sample(turn, reusable)
        for name in ("ids", "lengths", "terminated"):
            assert torch.equal(getattr(again, name), getattr(plain[turn], name))
        assert torch.allclose(again.sampler_logp, plain[turn].sampler_logp, atol=1e-12, rtol=0)

    check()
    assert recorder.replayed > 3 * recorder.recorded > 0
    if rows < G:
        return
    counts = []
    for turn in (0, 1, 0, 0):
        check(turn, reusable)
        counts.append(recorder.recorded)
    assert counts[3] == counts[2]
    if rows == 100:  # lengths of the second may need other sizes, or blocks, than the first
        assert counts[2] <= counts[0] + 3
        assert reusable.nbytes > 0
        reusable.release()
        assert reusable.nbytes == 0


def test_places_are_given_up_by_halves_and_prompts_have_few_widths_where_steps_are_recorded(load):
    def places_left(places: int, going_on: tuple[int, ...], few: int) -> list[int]:
        return [halved(places, needed, few) for needed in going_on]

    assert places_left(512, (512, 257, 256, 129, 128, 65, 64, 1), 64) == [
        512,
        512,
        256,
        256,
        128,
        128,
        64,
        64,
    ]
    assert places_left(64, (64, 32, 1), 64) == [64, 64, 64]
    assert places_left(9, (6, 5, 1), 4) == [9, 5, 5]
    config = load("gpt2").model.config  # 192 positions
    places = [padded_prompt_length(config, tokens, "cuda") for tokens in (1, 64, 65, 150, 192)]
    assert places == [64, 64, 128, 192, 192]
    assert padded_prompt_length(config, 50, "cpu") == 50
    assert padded_prompt_length(load("llama").model.config, 50, "cuda") == 64


def added(recorder: Any, by: float) -> tuple[list[float], Callable[[], None] | None]:
    """Returns what a step shows that adds to a count, and what replays it."""
    count = torch.zeros(2)
    replay = warm_up_and_capture(recorder, lambda: count.add_(by), changed=[count], shown=[count])
    return count.tolist(), replay


@pytest.mark.parametrize("by", [1.0, torch.nan])
def test_a_step_is_run_once_though_its_recording_is_compared(logged, by):
    """Numbers that are none are no reason to stop."""
    recorder = OperationRecorder()
    count, replay = added(recorder, by)
    assert str(count) == str([by, by]) and recorder.replayed == 1 and replay is not None and not logged


def test_a_driver_that_refuses_is_asked_once_and_a_replay_that_shows_something_else_is_not_used(logged):
    refuses = RuntimeError("CUDA error: operation not permitted when stream is capturing")
    driver = mock.Mock(works=True, **{"record.side_effect": refuses})
    assert added(driver, 1) == ([1, 1], None) and not driver.works
    assert len(logged) == 1 and "WARNING decoding goes on without recorded steps" in logged[0]
    driver = mock.Mock(works=True)  # launches nothing
    assert added(driver, 1) == ([1, 1], None) and not driver.works
    assert len(logged) == 2 and "the first replay gave other tokens" in logged[1]
    driver = mock.Mock(works=True, **{"record.side_effect": torch.OutOfMemoryError})
    with pytest.raises(torch.OutOfMemoryError):  # which is for those who replay the phase
        added(driver, 1)


def test_without_graphs_that_work_steps_run_as_they_are(load):
    recorder = OperationRecorder()
    recorder.works = False
    arena = Arena(load("gpt2").model, DecodeCapacity.of(G, 1, G, 4, T), recorder)
    arena.reset(SamplingSettings(max_new_tokens=T))
    arena.encode({0: [1, 2]})
    arena.begin(dict.fromkeys(range(G), 0), torch.rand(G, T))
    arena.decode_step()
    assert arena.sampled(range(G)).lengths.tolist() == [2] * G and recorder.recorded == 0


def test_a_capture_that_fails_leaves_the_pool(monkeypatch, logged):
    """By what is called for a CUDA device, without the device."""
    device = torch.device("cpu", 0)  # whose tensors are here
    cuda, leaves_pool = mock.MagicMock(), mock.Mock()
    cuda.graph_pool_handle.return_value, ends = (0, 1), cuda.graph.return_value.__exit__
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", leaves_pool, raising=False)
    graphs_of.cache_clear()
    try:
        ends.side_effect = RuntimeError("CUDA error: operation failed due to a previous error during capture")
        assert graphs_of(device) is graphs_of(device) is None  # a device that records nothing
        assert len(logged) == 1 and "without recorded steps" in logged[0]
        graphs_of.cache_clear()
        ends.side_effect = None
        graphs = graphs_of(device)
        assert graphs is not None and graphs.works and graphs_of(device) is graphs
        leaves_pool.reset_mock()
        was_on = []
        graphs.record(lambda: was_on.append(gc.isenabled()))
        assert was_on == [False] and gc.isenabled() and not leaves_pool.called
        ends.side_effect = RuntimeError("the same again")
        assert added(graphs, 1)[1] is None and not graphs.works and gc.isenabled()
        leaves_pool.assert_called_once_with(0, (0, 1))
        assert len(logged) == 2
    finally:
        graphs_of.cache_clear()


@pytest.mark.parametrize(
    ("wrong_tokens", "logp_error", "passes"),
    [(0, 0.0, True), (0, 0.019, True), (0, 0.03, False), (2, 0.0, True), (3, 0.0, False)],
)
def test_a_replay_has_to_repeat_98_of_100_tokens_and_their_log_probs(wrong_tokens, logp_error, passes):
    """Compares 100 rows; another token's log-prob does not matter."""
    ids, logp = torch.arange(100), -torch.rand(100)
    other_ids, other_logp = ids.clone(), logp + logp_error
    other_ids[:wrong_tokens] += 1
    other_logp[:wrong_tokens] -= 5
    assert is_repeated([other_ids, other_logp], [ids, logp]) == passes


def test_evaluations_find_the_arena_of_the_one_before(config, monkeypatch):
    """A second evaluation records no steps again."""
    seen = []
    monkeypatch.setattr("grpo.run.setup.records_steps", lambda *_: True)
    answer = planned.answer_heldout

    def note(*args, reusable, **options):
        seen.append(reusable.arena)
        return answer(*args, reusable=reusable, **options)

    monkeypatch.setattr(planned, "answer_heldout", note)
    train(replace(config, eval_interval=1, steps=2))
    assert seen[0] is None and seen[1] is seen[2] is not None
