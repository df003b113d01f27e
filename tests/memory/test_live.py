"""Bytes of live tensors, by hand and on fake tensors."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from grpo.memory import peak_live_bytes
from grpo.memory.live import LiveBytes


def test_a_storage_counts_once_from_its_first_tensor_to_its_last():
    with LiveBytes() as live:
        a = torch.zeros(100)
        assert live.live_bytes == 400
        views = [a.view(10, 10), a[10:], a.t(), a.detach(), *a.split(50)]
        assert live.live_bytes == 400
        del a
        assert live.live_bytes == 400  # held by its views
        copy = views[1].clone()
        assert live.live_bytes == 400 + 360
        del views
        assert live.live_bytes == 360
        del copy
    assert live.live_bytes == 0 and live.peak_bytes == 760


def test_in_place_and_on_what_existed_before_nothing_is_made():
    before = torch.ones(1000)
    with LiveBytes() as live:
        before.add_(1).mul_(before)
        before.view(10, 100).t().unsqueeze(0)
        torch.add(before, 1, out=before)
        before[3] = 5.0
    assert live.peak_bytes == 0


def test_each_result_of_an_operation_counts():
    x = torch.arange(40.0).view(10, 4)
    with LiveBytes() as live:
        kept = x.max(0)  # 4 floats, 4 int64 indices
        assert live.live_bytes == 16 + 32
        rows = x.unbind()
        pair = torch.frexp(x)  # 40 floats, 40 int32 exponents
    assert live.live_bytes == 48 + 160 + 160
    del kept, rows, pair


def test_the_peak_is_the_most_at_once_and_can_be_reset():
    with LiveBytes() as live:
        a = torch.zeros(100) + torch.ones(50).sum()  # 400 + 200 + 4, then 400 + 4 + 400
        assert live.peak_bytes == 804 and live.live_bytes == 400
        live.reset_peak()
        assert live.peak_bytes == 400
        b = torch.zeros(10)
    assert live.peak_bytes == 440
    del a, b


def test_the_log_says_what_is_held_at_each_operation():
    x = torch.ones(100)
    with LiveBytes(keep_log=True) as live:
        a = x * 2
        b = a.exp()
        del a
        c = b * 2
        d = c[:1].exp()
    mul, exp = "aten.mul.Tensor", "aten.exp.default"
    assert live.log == [(mul, 400), (exp, 800), (mul, 800), (exp, 804)]
    assert live.peak_bytes == 804
    del b, c, d


def test_sizes_are_rounded_up_as_an_allocator_does():
    def work() -> list[torch.Tensor]:
        return [torch.zeros(1), torch.zeros(128), torch.zeros(129)]

    assert peak_live_bytes(work) == 4 + 512 + 516
    assert peak_live_bytes(work, block_bytes=lambda size: -(-size // 512) * 512) == 512 + 512 + 1024


def test_other_devices_do_not_count():
    assert peak_live_bytes(lambda: torch.zeros(100), device_type="cuda") == 0


def test_what_a_graph_holds_counts_until_the_backward_pass_has_used_it():
    w = torch.ones(100, requires_grad=True)
    with LiveBytes() as live:
        loss = w.exp().sum()  # exp keeps its result for the backward pass
        assert live.live_bytes == 404
        loss.backward()  # a one to begin with, then the product: the gradient
        assert live.peak_bytes == 404 + 4 + 400
        assert live.live_bytes == 4 + 400
        w.grad = None
        assert live.live_bytes == 4
    del loss


def test_after_an_error_counting_has_ended():
    with pytest.raises(ZeroDivisionError), LiveBytes() as live:
        kept = torch.zeros(10)
        raise ZeroDivisionError
    torch.zeros(100)
    assert live.live_bytes == live.peak_bytes == 40
    del kept


def make_block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 96), nn.GELU(), nn.Linear(96, 24), nn.Dropout(0.1))


def passes(block: nn.Module, x: torch.Tensor) -> list[tuple[str, int]]:
    """Forward and backward."""
    with LiveBytes(keep_log=True) as live:
        (block(x).softmax(-1) * x).pow(2).sum().backward()
    return [*live.log, ("all", live.peak_bytes), ("left", live.live_bytes)]


def test_fake_tensors_count_as_real_ones_do():
    real = passes(make_block(), torch.ones(7, 24))
    with FakeTensorMode():
        fake = passes(make_block(), torch.ones(7, 24))
    assert fake == real
    assert real[-1][1] == 4 * (2 * 24 + 24 * 96 + 96 + 96 * 24 + 24)  # a gradient for each parameter


# ------------------------------------------------------------- against what the allocator itself says


def allocator_peak(work: Callable[[], object]) -> int:
    """Peak bytes by the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = work()
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    events = sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    del kept
    return max(itertools.accumulate(event.nbytes() for event in events))


X = torch.randn(64, 128)
LOW = X.bfloat16()
ROWS = X.view(4, 16, 128)


def block_passes() -> None:
    torch.manual_seed(0)
    make_block()(torch.ones(500, 24)).softmax(-1).sum().backward()


def layer_norm_of_a_transposed_gradient() -> object:
    norm, x = nn.LayerNorm(128), X.repeat(20, 1).requires_grad_()
    return norm(x).backward(torch.ones(128, 1280).t())


@pytest.mark.parametrize(
    "work",
    [
        lambda: (X * 2).exp().sum(),
        lambda: X * LOW,  # bf16 is converted as a whole
        lambda: LOW + LOW,
        lambda: X.logsumexp(-1),  # the exponentials
        lambda: ROWS @ ROWS.transpose(1, 2),
        layer_norm_of_a_transposed_gradient,
        block_passes,
    ],
)
def test_peaks_are_those_of_the_allocator(work: Callable[[], object]):
    work()  # what is set up once is no part of it
    truth = allocator_peak(work)
    assert peak_live_bytes(work) == pytest.approx(truth, rel=0.01)
