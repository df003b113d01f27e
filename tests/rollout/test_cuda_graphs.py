"""Recorded steps: what is replayed reads and writes the same tensors, and gives what the step gives."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import grpo.rollout.decoder
import grpo.rollout.sample
from grpo.config.groups import SamplingSettings
from grpo.rollout.cuda_graphs import RecordedSteps, recorder_of
from grpo.rollout.decoder import leave_at_once, make_decoder
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.types import Prompt, Rollout

G = 3


class OperationRecorder:
    """As a CUDA graph does: the same operations on the same tensors, with the numbers Python had then."""

    def __init__(self) -> None:
        self.works = True
        self.recorded = self.replayed = 0

    def record(self, work: Callable[[], object]) -> Callable[[], None]:
        with _Noted() as noted:
            work()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
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


@torch.no_grad()
def test_replayed_steps_give_what_steps_give(load):
    """Across blocks, while groups start over and leave; the tokens' places are not the recorded ones."""
    model, recorder = load("gpt2", "fp64").model, OperationRecorder()
    plain, replaying = make_decoder(model, 120), make_decoder(model, 120, recorder=recorder)
    tokens = torch.arange(3 * G)

    def both(work: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        expected, logits = work(plain), work(replaying)
        assert torch.allclose(logits, expected, atol=1e-12, rtol=0)
        return logits

    both(lambda decoder: decoder.prefill([[1, 2, 3], [4, 5], [6]], G, longest_prompt=4))
    for step in range(110):
        if step in (30, 80):
            place = 1 if step == 30 else 0
            both(lambda decoder, place=place: decoder.replace([place], [[7, 8, 9, 10]]))
        if step == 70:
            plain.keep([1, 2]), replaying.keep([1, 2])
            tokens = tokens[G:]
        newest = tokens + step
        both(lambda decoder, newest=newest: decoder.step(newest))
    assert recorder.recorded == 4  # one and two blocks; then of fewer groups: two, and three
    assert recorder.replayed == 1 + 110 - 4  # the first is compared


def _sample(policy, prompts, *, rows: int) -> Rollout:
    settings = SamplingSettings(max_new_tokens=60)
    uniforms = step_uniforms(len(prompts) * G, 60, seed=0, step=1)
    return rollout(policy.model, policy.tokenizer, prompts, uniforms, settings, rows=rows)


@pytest.mark.parametrize("rows", [100, 4 * G, 2])
def test_rollouts_of_recorded_steps_are_the_same(load, prompts, rows, monkeypatch):
    """Groups leave by halves, waiting ones take places, and a group may be split."""
    policy = load("gpt2", "fp64")
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[policy.tokenizer.eos_token_id] *= 0.3
    many = [Prompt(f"{n}", prompt.text[: 12 + n], {}) for n in range(2) for prompt in prompts]
    plain = _sample(policy, many, rows=rows)
    assert len(plain.lengths.unique()) > 4 and plain.lengths.max() > 48

    recorder = OperationRecorder()
    monkeypatch.setattr(grpo.rollout.decoder, "records_steps", lambda model: True)
    monkeypatch.setattr(grpo.rollout.decoder, "recorder_of", lambda device: recorder)
    recorded = _sample(policy, many, rows=rows)
    assert torch.equal(recorded.completion_ids, plain.completion_ids)
    assert torch.equal(recorded.lengths, plain.lengths)
    assert torch.allclose(recorded.sampler_logp, plain.sampler_logp, atol=1e-12, rtol=0)
    assert recorder.replayed > 3 * recorder.recorded > 0


def test_groups_leave_together_where_a_step_would_be_recorded_anew(load, monkeypatch):
    model = load("gpt2").model
    assert [leave_at_once(model, groups) for groups in (8, 5, 1)] == [1, 1, 1]
    monkeypatch.setattr(grpo.rollout.decoder, "records_steps", lambda model: True)
    assert [leave_at_once(model, groups) for groups in (8, 5, 1)] == [4, 3, 1]


class Recording:
    """A recorder of which only what it does is given."""

    def __init__(self, record: Callable[[Callable[[], object]], Callable[[], None]]) -> None:
        self.works, self.record = True, record


def _counting(tokens: torch.Tensor, num_blocks: int) -> torch.Tensor:
    return tokens.double() * num_blocks


def test_a_driver_that_refuses_is_asked_once(logged):
    asked = []

    def refuse(work: Callable[[], object]) -> Callable[[], None]:
        asked.append(1)
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    recorder = Recording(refuse)
    for steps in (RecordedSteps(recorder), RecordedSteps(recorder)):  # of one rollout and of the next
        for token in range(4):
            tokens = torch.tensor([token, 1])
            assert torch.equal(steps(_counting, tokens, 2), 2.0 * tokens)
    assert len(asked) == 1
    assert [line for line in logged if "WARNING decoding goes on without recorded steps" in line] == logged


def test_a_replay_that_gives_other_logits_is_not_used(logged):
    steps = RecordedSteps(Recording(lambda work: lambda: None))  # launches nothing
    for token in (3, 4, 5):
        tokens = torch.tensor([token, 1])
        assert torch.equal(steps(_counting, tokens, 1), 1.0 * tokens)
    assert len(logged) == 1 and "the first replay gave other logits" in logged[0]


def test_logits_that_are_not_numbers_are_no_reason_to_stop_recording(logged):
    recorder = OperationRecorder()
    steps = RecordedSteps(recorder)
    for _ in range(3):
        assert steps(lambda tokens, _: tokens * torch.nan, torch.tensor([1.0]), 1).isnan().all()
    assert not logged and recorder.replayed == 3


def test_out_of_memory_while_recording_is_for_those_who_replay_the_phase():
    def full(work: Callable[[], object]) -> Callable[[], None]:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        RecordedSteps(Recording(full))(_counting, torch.tensor([1]), 1)


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
    steps = RecordedSteps(recorder)
    assert torch.equal(steps(_counting, torch.tensor([3]), 1), torch.tensor([3.0]).double())
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


@torch.no_grad()
def test_a_decoder_goes_with_its_last_user(load):
    """Its cache is large: nothing that it recorded may hold it until the collector comes."""
    decoder = make_decoder(load("gpt2").model, 10, recorder=OperationRecorder())
    decoder.prefill([[1, 2]], G)
    for _ in range(3):
        decoder.step(torch.arange(G))
    gone = weakref.ref(decoder)
    gc.disable()
    try:
        del decoder
        assert gone() is None
    finally:
        gc.enable()
