"""A step's result does not depend on how many rows go through forward and backward at once (I1).

On small random models and the bundled one, prompts of mixed lengths, at the exactness that the README states.
"""

import dataclasses
import itertools

import pytest
import torch
from conftest import ARCHITECTURES, CPU
from whole_runs import BY_FIELD, assert_close_outcome, outcome, train

from grpo import phases
from grpo.config.groups import Checkpointing, LossSettings, SamplingSettings
from grpo.data import load_prompts
from grpo.data.reward_functions import RewardFunctions
from grpo.learning.advantages import field_credit, group_advantages
from grpo.learning.loss import loss_counts
from grpo.learning.objectives import accumulate_grpo, finish_grpo
from grpo.model.load import load_policy
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.scoring import head
from grpo.scoring.head import chunked_lm_head
from grpo.scoring.logprobs import score
from grpo.types import Batch

G, LENGTH = 3, 12
N = 4 * G
LOSSES = ("grpo", "dapo", "dr_grpo", "cispo")
KL = LossSettings(kl_coef=0.1)


def frozen_batch(policy, prompts, *, length: int = LENGTH) -> Batch:
    """A step off its old policy, so that ratios are not 1 and some are clipped; truncated rows masked."""
    uniforms = step_uniforms(N, length, seed=0, step=1)
    settings = SamplingSettings(max_new_tokens=length)
    sampled = rollout(policy.model, policy.tokenizer, prompts, uniforms, settings, rows=N)
    generator = torch.Generator().manual_seed(2)
    now = score(policy.model, sampled, rows=N, temperature=1.0, dtype=policy.target.dtype)
    old, ref = (now + 0.2 * torch.randn(now.shape, generator=generator).to(now) for _ in range(2))
    advantages = torch.randn(N, generator=generator, dtype=torch.float64)
    assert len(sampled.lengths.unique()) > 4
    return sampled.with_columns(
        credit=advantages[sampled.row], learned=sampled.terminated[sampled.row], old_logp=old, ref_logp=ref
    )


def learn(
    policy,
    batch,
    loss: LossSettings,
    rows: int,
    *,
    checkpointing: Checkpointing = "none",
    of_equal_rows=False,
) -> tuple[torch.Tensor, dict[str, float]]:
    """One step's gradient as one vector, and its metrics."""
    policy.model.zero_grad(set_to_none=True)
    counts = loss_counts(batch, LENGTH)
    sums = accumulate_grpo(
        policy.model,
        batch,
        counts,
        settings=loss,
        temperature=1.0,
        dtype=policy.target.dtype,
        rows=rows,
        importance_cap=2.0,
        checkpointing=checkpointing,
        of_equal_rows=of_equal_rows,
    )
    metrics = finish_grpo([sums], counts)
    return torch.cat([p.grad.flatten() for p in policy.model.parameters()]), metrics


def assert_same_step(one, other, *, exactness: float) -> None:
    (gradient, metrics), (other_gradient, other_metrics) = one, other
    assert gradient.norm() > 1e-3
    assert (gradient - other_gradient).norm() <= exactness * gradient.norm()
    assert other_metrics == pytest.approx(metrics, rel=100 * exactness, abs=exactness, nan_ok=True)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_i1_a_steps_gradient_and_metrics_do_not_depend_on_the_split_in_float64(load, prompts, architecture):
    """To 1e-12, whole groups or cut ones, whatever is left over for the last pass; recomputed or kept."""
    policy = load(architecture, "fp64")
    batch = frozen_batch(policy, prompts)
    assert not batch.learned.all()
    whole = learn(policy, batch, KL, N)
    for rows in (1, 2, 3, 5, 7, N - 1):
        assert_same_step(whole, learn(policy, batch, KL, rows), exactness=1e-12)
    assert_same_step(whole, learn(policy, batch, KL, 3, of_equal_rows=True), exactness=1e-12)
    for checkpointing, rows in (("full", 2), ("full", N)):
        again = learn(policy, batch, KL, rows, checkpointing=checkpointing)
        assert_same_step(whole, again, exactness=1e-12)


@pytest.mark.parametrize(
    ("loss_type", "level", "estimator"),
    [*itertools.product(LOSSES, ("token", "sequence"), ("k3",)), ("dapo", "token", "k2")],
)
def test_i1_holds_for_every_loss(load, prompts, monkeypatch, loss_type, level, estimator):
    """And for chunks of the head: multiplied once where a token's loss depends on it alone, else twice."""
    policy = load("gpt2", "fp64")
    batch = frozen_batch(policy, prompts)
    loss = LossSettings(loss_type, importance_level=level, kl_coef=0.1, kl_estimator=estimator)
    whole = learn(policy, batch, loss, N)
    for rows in (1, 2, 5, N):
        assert_same_step(whole, learn(policy, batch, loss, rows), exactness=1e-12)
    multiplied = []
    multiply = head._Head.multiply
    monkeypatch.setattr(head._Head, "multiply", lambda *args: [multiplied.append(1), multiply(*args)][1])
    monkeypatch.setitem(chunked_lm_head.__wrapped__.__kwdefaults__, "chunk_tokens", 7)
    assert_same_step(whole, learn(policy, batch, loss, N), exactness=1e-12)
    chunks = -(-int(batch.learned.sum()) // 7)
    assert len(multiplied) == (chunks if level == "token" else 2 * chunks) > 4


def test_i1_a_split_by_hand_with_plain_forward_passes_gives_the_same_gradient(load, prompts):
    """dapo without clipping in effect, one row at a time, in a few lines of plain torch."""
    policy = load("gpt2", "fp64")
    batch = dataclasses.replace(frozen_batch(policy, prompts), old_logp=None)
    gradient, _ = learn(policy, dataclasses.replace(batch, ref_logp=None), LossSettings(kl_coef=0.0), 5)
    policy.model.zero_grad(set_to_none=True)
    tokens, completions = int(batch.learned.sum()), batch.by_row(batch.ids)
    sampler_logp, credit = batch.by_row(batch.sampler_logp), batch.by_row(batch.credit)
    for row in batch.terminated.nonzero().flatten().tolist():
        completion = completions[row].tolist()
        prompt = batch.context_ids[row // G]
        logits = policy.model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0]
        logp = logits[len(prompt) - 1 : -1].log_softmax(-1)[range(len(completion)), completion]
        weight = (logp.detach() - sampler_logp[row]).exp()  # 1 but for rounding
        (-credit[row] * logp * weight).sum().div(tokens).backward()
    by_hand = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    assert (gradient - by_hand).norm() < 1e-12 * by_hand.norm()


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_i1_in_fp32_to_rounding(load, prompts, architecture):
    policy = load(architecture, "fp32")
    batch = frozen_batch(policy, prompts)
    whole = learn(policy, batch, KL, N)
    for rows in (1, 5, 11):
        assert_same_step(whole, learn(policy, batch, KL, rows), exactness=1e-5)


# ----------------------------------------------------------------------------------- credit by field


def test_i1_holds_where_each_field_has_its_advantage():
    """The demo's credit with the bundled model: rows are split by field, as the tests' own never are."""
    policy = load_policy("rook-tiny", CPU, "fp64")
    source = load_prompts("bundled", seed=0, heldout_share=0)
    batch = frozen_batch(policy, source.draw(4), length=64)
    rewards = RewardFunctions(["policy-legal", "environment-sparse"], [2.0, 1.0])
    scores = rewards(batch)
    judged = rewards.judged(scores, batch.texts)
    credit = field_credit(
        group_advantages(scores.rewards, G, scale="batch"),
        scores.rewards,
        judged,
        batch,
        policy.tokenizer,
        scale="batch",
    )
    assert sum(len(own.unique()) > 1 for own in batch.by_row(credit)) >= 3
    batch = batch.with_columns(credit=credit)
    whole = learn(policy, batch, KL, N)
    for rows in (2, 5):
        assert_same_step(whole, learn(policy, batch, KL, rows), exactness=1e-12)


# ---------------------------------------------------------------------------------------- whole runs


@pytest.mark.usefixtures("made_up_plans")
@pytest.mark.parametrize("changes", [{}, BY_FIELD], ids=["whole", "credit by field"])
def test_a_whole_run_depends_neither_on_its_rows_nor_on_memory_running_out(config, monkeypatch, changes):
    """To 1e-12 in float64: by plans that have nothing in common, and where each phase is replayed smaller."""
    config = dataclasses.replace(
        config,
        precision="fp64",
        reward=("policy", "environment"),
        checkpoint_interval=2,
        learning_rate=1e-3,
        logged_completions=16,
    )
    config = dataclasses.replace(config, **changes)
    straight = outcome(train(dataclasses.replace(config, name="straight")))
    assert any(row["advantage"] for row in straight["completions"])
    tried = {}
    for name in ("begin_rollout", "score", "accumulate_grpo"):
        work = getattr(phases, name)

        def runs_out_twice(*args, work=work, name=name, **options):
            done = work(*args, **options)
            tried.setdefault(name, []).append(options["rows"])
            if len(tried[name]) <= 2:
                if name == "begin_rollout":
                    done.finish()
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return done

        monkeypatch.setattr(phases, name, runs_out_twice)
    rows = {"rollout_rows": 4, "score_rows": 4, "train_rows": 2}
    other = outcome(train(dataclasses.replace(config, name="other rows", **rows)))
    assert [sizes[:3] for sizes in tried.values()] == [[4, 4, 2], [4, 4, 2], [2, 2, 1]]
    assert_close_outcome(straight, other, exactness=1e-12)
