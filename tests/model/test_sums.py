"""The weighted sums that decoding's attention is made of, by lookup and by products."""

import pytest
import torch

from grpo.memory.live import LiveBytes
from grpo.model.cpu.sums import bags, weighted_sums

B, G, H, M, W = 3, 2, 4, 5, 6


def example(dtype, *, g=G, n=M):
    torch.manual_seed(0)
    weights, tables = torch.randn(B * g, H, n, dtype=dtype), torch.randn(B, H, M, W, dtype=dtype)
    by_hand = torch.einsum("rhn,rhnw->rhw", weights, tables.repeat_interleave(g, 0)[:, :, :n])
    return weights, tables, by_hand


@pytest.mark.parametrize("n", [1, 3, M])
@pytest.mark.parametrize("g", [1, G])
@pytest.mark.parametrize("looked_up", [True, False])
def test_they_are_sums_over_the_first_rows_of_each_rows_table(g, n, looked_up):
    weights, tables, by_hand = example(torch.float64, g=g, n=n)
    chosen = bags(tables, n, g=g) if looked_up else None
    sums = weighted_sums(weights, tables, chosen)
    torch.testing.assert_close(sums, by_hand, rtol=0, atol=1e-14)
    assert torch.equal(weighted_sums(weights, tables, chosen, width=2), sums[..., :2])


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_lower_precision_adds_up_exactly_and_rounds_once(dtype, limit):
    weights, tables, _ = example(dtype)
    sums = weighted_sums(weights, tables, bags(tables, M, g=G))
    exact = weighted_sums(weights.double(), tables.double(), None)
    assert sums.dtype == dtype
    assert (sums - exact).abs().max() < limit * exact.abs().max()


def test_a_row_comes_out_the_same_whoever_is_beside_it():
    weights, tables, _ = example(torch.float32)
    together = weighted_sums(weights, tables, bags(tables, M, g=G))
    for b in range(B):
        alone = weighted_sums(weights[b * G : (b + 1) * G], tables[b : b + 1], bags(tables[:1], M, g=G))
        assert torch.equal(alone, together[b * G : (b + 1) * G])


def test_other_devices_multiply():
    assert bags(torch.empty(B, H, M, W, device="meta"), M) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_counted_with_what_the_lookup_copies(dtype):
    weights, tables, _ = example(dtype)
    chosen = bags(tables, M, g=G)
    with LiveBytes() as live, torch.no_grad():
        sums = weighted_sums(weights, tables, chosen)
    converted = 4 * weights.numel() if dtype == torch.bfloat16 else 0
    # beside what it returns: the number of each bag's rows, twice
    assert live.peak_bytes == sums.nbytes + 2 * chosen.starts.nbytes + converted
