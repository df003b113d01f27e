"""Traces on tensors without storage say what real passes allocate, and made-up passes what a step's do."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import ARCHITECTURES
from families import SIZES
from real_phases import FullLengthTokenizer, RealPhases, Setting, allocator_peak, nameless_prompts
from transformers import AutoConfig

from grpo.config.groups import LoraSettings, OptimizerSettings, SamplingSettings
from grpo.learning.loss import loss_counts
from grpo.learning.objectives import accumulate_grpo
from grpo.learning.optimizer import make_optimizer
from grpo.memory import PassSize, peak_live_bytes
from grpo.plan.trace import TracedPhases
from grpo.rollout.sample import rollout
from grpo.scoring.logprobs import score
from grpo.types import Batch

G, VOCABULARY = 4, 96
SIZE = PassSize(4 * G, 24, 40)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
LORA, BF16 = LoraSettings(lora_rank=8), torch.bfloat16


def setting_of(name: str = "gpt2", layers: int = 2, width: int = 32, **options: object) -> Setting:
    config = ARCHITECTURES[name](VOCABULARY).config
    config.num_hidden_layers, config.hidden_size = layers, width
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * layers
    for key in vars(config):
        if key.endswith(("_pdrop", "dropout")):
            setattr(config, key, 0.0)
    return replace(Setting(name, config, group_size=G), **options)  # type: ignore[arg-type]


def traced_on(device_type: str, **options: object) -> TracedPhases:
    work = setting_of(**options).workload()  # type: ignore[arg-type]
    target = replace(work.target, device=torch.device(device_type), attention="sdpa")
    return TracedPhases(replace(work, target=target))


@pytest.mark.parametrize(
    ("name", "options", "off"),
    [
        ("gpt2", {}, 0.02),
        ("llama", {"checkpointing": "full"}, 0.02),
        ("gpt2", {"compute_dtype": BF16, "kl": False}, 0.02),
        ("llama", {"lora": LORA, "compute_dtype": BF16}, 0.002),
        ("qwen", {"checkpointing": "full", "compute_dtype": BF16}, 0.002),
        ("llama", {"lora": LoraSettings(lora_rank=8, load_in_4bit=True), "width": 128}, 0.06),
    ],
)
def test_a_trace_is_what_the_real_pass_allocates(name: str, options: dict, off: float):
    """By the allocator's own record, and by the meter of the traces: whole groups, and part of one."""
    setting = setting_of(name, **options)
    real, traced = RealPhases(setting), TracedPhases(setting.workload())
    for phase in traced.work.phases:
        for size in (SIZE, SIZE._replace(rows=2)) if phase == "learn" else (SIZE,):
            work = real.prepare(phase, size)
            work()  # what is set up once is no part of it
            found = traced.added_bytes(phase, size)
            # Fused attention uses some by thread, and so do products in bf16; processors that have none
            # turn what they multiply into fp32.
            within = 2**18 * (setting.compute_dtype == BF16)
            most = max(off, 0.03) if phase == "sample" else off
            assert found == pytest.approx(allocator_peak(work), rel=most, abs=within), (phase, size)
            assert found == pytest.approx(peak_live_bytes(work), rel=most), (phase, size)
    assert all(parameter.grad is None for parameter in real.policy.parameters())
    # What exists between passes, counted one by one.
    optimizer = make_optimizer(real.policy, OptimizerSettings(), real.low_bits)
    moments = sum(value.nbytes for entry in optimizer.state.values() for value in entry.values())
    parts = traced.phases.resident()
    assert sorted(traced.phases.trained_sizes) == sorted(real.trained_sizes)
    assert parts["optimizer"] == pytest.approx(moments, rel=0.01)  # steps have numbers of their own
    if not setting.lora.load_in_4bit:  # whose tables are no parameters
        assert parts["weights"] == sum(each.nbytes for each in real.policy.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_mixture_of_experts_is_traced_as_it_is_passed(dtype):
    """torch's grouped products have no stand-in but in bf16, and autocast leaves those of experts in fp32."""
    shape = AutoConfig.for_model("qwen3_moe", **{**SIZES, **EXPERTS, "num_key_value_heads": 2})
    setting = Setting("qwen3_moe", shape, compute_dtype=dtype, group_size=G)
    real, traced = RealPhases(setting), TracedPhases(setting.workload())
    for phase in traced.work.phases:
        work = real.prepare(phase, SIZE)
        work()
        assert traced.added_bytes(phase, SIZE) == pytest.approx(peak_live_bytes(work), rel=0.01)


def test_a_made_up_pass_holds_what_a_steps_does():
    """A step of two parts, whose second finds gradients and replaces groups; no text ends before its last
    token."""
    real, rows = RealPhases(setting := setting_of()), 2 * G
    real.work = real.work.with_settings(batch_size=2 * rows)
    prompts = nameless_prompts(2 * rows // G)
    uniforms = torch.ones(2 * rows, SIZE.completion_tokens) - 1e-3  # token 0 ends a text: only 0 samples it
    uniforms[rows - G : rows, -2] = 0.0  # a group ends while the others' cache is full
    uniforms[-G:, 0] = 0.0  # the last to come leaves at once, and what stays is copied
    made = Batch.of_rows(
        prompts,
        [[1] * SIZE.prompt_tokens] * len(prompts),
        torch.ones(2 * rows, SIZE.completion_tokens, dtype=torch.long),
        torch.full((2 * rows,), SIZE.completion_tokens),
        terminated=torch.zeros(2 * rows, dtype=torch.bool),
        sampler_logp=torch.zeros(2 * rows, SIZE.completion_tokens),
        texts=[""] * 2 * rows,
    )
    counts, ones = loss_counts(made, SIZE.completion_tokens), torch.ones(len(made.ids))
    batch = made.with_columns(credit=ones, ref_logp=torch.zeros_like(ones))
    common = {"temperature": 1.0, "dtype": setting.compute_dtype, "rows": rows}

    def learn() -> None:
        real.policy.zero_grad(set_to_none=True)
        accumulate_grpo(real.policy, batch, counts, settings=real.work.config, **common)

    sampling = SamplingSettings.of(real.work.config, max_new_tokens=SIZE.completion_tokens)
    texts = FullLengthTokenizer(SIZE.prompt_tokens), prompts
    steps: dict[str, Callable[[], object]] = {
        "sample": partial(rollout, real._sampler, *texts, uniforms, sampling, rows=rows, ends=(0,)),
        "score": torch.no_grad()(partial(score, real.policy, made, **common)),
        "learn": learn,
    }
    for phase, work in steps.items():
        work()
        real.drop_gradients()
        held = allocator_peak(work)
        real.drop_gradients()
        made_up = real.prepare(phase, SIZE._replace(rows=rows, batch_rows=2 * rows))
        assert allocator_peak(made_up) == pytest.approx(held, rel=0.02), phase
    # All at once nobody waits, and no group is replaced.
    whole = partial(rollout, real._sampler, *texts, uniforms, sampling, rows=2 * rows, ends=(0,))
    made_up = real.prepare("sample", SIZE._replace(rows=2 * rows))
    assert allocator_peak(made_up) == pytest.approx(allocator_peak(whole), rel=0.04)


def test_a_pass_of_few_rows_or_tokens_is_traced_as_it_is_done_and_a_phase_has_to_be_one():
    traced = TracedPhases(setting_of().workload())
    found = [traced.added_bytes("score", SIZE._replace(rows=rows)) for rows in (1, 2, 4, 8)]
    assert found == sorted(set(found))
    assert traced.added_bytes("sample", PassSize(1, 1, 1)) > 0
    with pytest.raises(KeyError):
        traced.added_bytes("update", SIZE)


def test_what_costs_memory_on_cards_shows():
    """Norms in fp32 by autocast; and the room of a recorded token."""
    lower = {"compute_dtype": BF16, "lora": LoraSettings(lora_rank=2)}
    more, less = (traced_on(of, **lower).added_bytes("learn", SIZE) for of in ("cuda", "xpu"))
    activation = SIZE.rows * SIZE.completion_tokens * 32
    assert more - less > 5 * 2 * activation
    recorded, plain = (traced_on(of).added_bytes("sample", PassSize(G, 24, 64)) for of in ("cuda", "xpu"))
    assert recorded > plain  # as much as a token takes to run, for as long as there are rows


def test_keys_and_values_are_held_as_the_device_that_is_planned_for_holds_them():
    """In bf16 on a card, and in fp32 on a CPU, on whichever the trace is made."""
    size, traces = PassSize(32 * G, 96, 40), [traced_on(of, compute_dtype=BF16) for of in ("xpu", "cpu")]
    (card, host), (more, most) = (
        [trace.phases.known_parts("sample", size)["KV cache"] for trace in traces],
        [trace.added_bytes("sample", size) for trace in traces],
    )
    assert host == 2 * card and card < most - more < 1.3 * card
    assert more < 2 * card


def test_attention_with_a_mask_has_a_workspace_on_cards_in_bf16():
    """A block of 64 x 64 in fp32 for each 64 queries of each row and head: 16 KB; wider heads have more."""

    def unseen(width: int, dtype: torch.dtype, phase: str = "learn") -> int:
        traced = object.__new__(TracedPhases)
        target = setting_of(width=width).target
        target = replace(target, device=torch.device("cuda"), dtype=dtype)
        traced.work = replace(setting_of().workload(), target=target)
        return traced._unseen(phase, PassSize(64, 144, 60)) - traced._unseen("score", SIZE)  # 143 queries

    assert unseen(128, BF16) == 64 * 2 * 3 * 16 * 2**10 and unseen(256, BF16) == 64 * 2 * 3 * 32 * 2**10
    assert unseen(128, torch.float32) == unseen(128, BF16, "sample") == 0


def test_a_pass_is_traced_once(monkeypatch):
    traced = TracedPhases(setting_of().workload())
    first = traced.added_bytes("score", SIZE)
    monkeypatch.setattr(TracedPhases, "_trace", None)
    assert traced.added_bytes("score", SIZE) == first
