"""What a step's result does not depend on: the split (I1), the sampling plan (I2), interruption (I5).

On small random models, prompts of mixed lengths, at the exactness that the README states.
"""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from conftest import ARCHITECTURES
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file

from grpo.config.groups import Checkpointing, OptimizerSettings, SamplingSettings
from grpo.learning import objectives
from grpo.learning.loss import LossSettings, loss_counts
from grpo.learning.objectives import GRPOBatch, accumulate_grpo, finish_grpo
from grpo.learning.step import Stepper
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.run.interrupt import StopRequest
from grpo.run.journal import Journal
from grpo.run.setup import open_run
from grpo.run.tracking import COMPLETIONS_FILE, METRICS_FILE, read_lines
from grpo.scoring.head import Head
from grpo.scoring.logprobs import completion_logprobs
from grpo.scoring.micro_batches import micro_batches, score
from grpo.trainer import Trainer
from grpo.types import Prompt, Rollout

pytestmark = pytest.mark.usefixtures("made_up_plans")

G, LENGTH = 3, 12
N = 4 * G
SAMPLING = SamplingSettings(max_new_tokens=LENGTH)
HARD = settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
LOSSES = ("grpo", "dapo", "dr_grpo", "cispo")


def sample(policy, prompts, uniforms, *, rows: int) -> Rollout:
    return rollout(policy.model, policy.tokenizer, prompts, uniforms, SAMPLING, rows=rows)


# ------------------------------------------------------------------------------------------ I1 split


def frozen_batch(policy, prompts) -> GRPOBatch:
    """A step off its old policy, so that ratios are not 1 and some are clipped; truncated rows masked."""
    sampled = sample(policy, prompts, step_uniforms(N, LENGTH, seed=0, step=1), rows=N)
    generator = torch.Generator().manual_seed(2)
    now = score(policy.model, sampled, rows=N, temperature=1.0, dtype=policy.target.dtype)
    old, ref = (now + 0.2 * torch.randn(now.shape, generator=generator).to(now) for _ in range(2))
    advantages = torch.randn(N, generator=generator, dtype=torch.float64)
    mask = sampled.mask & sampled.terminated.unsqueeze(1)
    assert mask.any(1).sum() < N and len(sampled.lengths.unique()) > 4
    return GRPOBatch(sampled, advantages, mask, loss_counts(mask, LENGTH), old, ref)


def learn(
    policy, batch, loss: LossSettings, rows: int, *, checkpointing: Checkpointing = "none", pass_tokens=None
) -> tuple[torch.Tensor, dict[str, float]]:
    """One step's gradient as one vector, and its metrics."""
    policy.model.zero_grad(set_to_none=True)
    sums = accumulate_grpo(
        policy.model, batch, settings=loss, temperature=1.0, dtype=policy.target.dtype, rows=rows,
        importance_cap=2.0, checkpointing=checkpointing, pass_tokens=pass_tokens,
    )  # fmt: skip
    metrics = finish_grpo([sums], batch.counts)
    return torch.cat([p.grad.flatten() for p in policy.model.parameters()]), metrics


def assert_same_step(one, other, *, exactness: float) -> None:
    (gradient, metrics), (other_gradient, other_metrics) = one, other
    assert gradient.norm() > 1e-3
    assert (gradient - other_gradient).norm() <= exactness * gradient.norm()
    assert other_metrics == pytest.approx(metrics, rel=100 * exactness, abs=exactness, nan_ok=True)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_i1_a_steps_gradient_and_metrics_do_not_depend_on_the_split_in_float64(load, prompts, architecture):
    """To 1e-12, whole groups or cut ones, whatever is left over for the last micro-batch."""
    policy = load(architecture, "fp64")
    batch = frozen_batch(policy, prompts)
    whole = learn(policy, batch, LossSettings(kl_coef=0.1), N)
    for rows in range(1, N):
        assert_same_step(whole, learn(policy, batch, LossSettings(kl_coef=0.1), rows), exactness=1e-12)
    parted = learn(policy, batch, LossSettings(kl_coef=0.1), N, pass_tokens=0)
    assert_same_step(whole, parted, exactness=1e-12)
    num_lengths = len(batch.rollout.lengths.view(-1, G).amax(1).unique())
    assert len(list(micro_batches(batch.rollout, N, pass_tokens=0))) == num_lengths


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_i1_holds_where_activations_are_recomputed(load, prompts, architecture):
    policy = load(architecture, "fp64")
    batch = frozen_batch(policy, prompts)
    whole = learn(policy, batch, LossSettings(kl_coef=0.1), N)
    for checkpointing in ("selective", "full"):
        for rows in (1, 2, 5, N):
            recomputed = learn(policy, batch, LossSettings(kl_coef=0.1), rows, checkpointing=checkpointing)
            assert_same_step(whole, recomputed, exactness=1e-12)


@pytest.mark.parametrize(
    ("loss_type", "level", "estimator"),
    [*itertools.product(LOSSES, ("token", "sequence"), ("k3",)), ("dapo", "token", "k2")],
)
def test_i1_holds_for_every_loss(load, prompts, loss_type, level, estimator):
    policy = load("gpt2", "fp64")
    batch = frozen_batch(policy, prompts)
    loss = LossSettings(loss_type, importance_level=level, kl_coef=0.1, kl_estimator=estimator)
    whole = learn(policy, batch, loss, N)
    for rows in (1, 2, 3, 5, 7):
        assert_same_step(whole, learn(policy, batch, loss, rows), exactness=1e-12)


@pytest.mark.parametrize(("loss_type", "level"), itertools.product(LOSSES, ("token", "sequence")))
def test_i1_holds_for_chunks_of_the_head(load, prompts, monkeypatch, loss_type, level):
    """Whose logits are multiplied once where a token's loss is known from the token, and else twice."""
    policy = load("gpt2", "fp64")
    batch = frozen_batch(policy, prompts)
    loss = LossSettings(loss_type, importance_level=level, kl_coef=0.1)
    logprobs = objectives.micro_batch_logprobs
    with monkeypatch.context() as patch:  # autograd's way, by logits that are multiplied again
        patch.setattr(
            objectives,
            "micro_batch_logprobs",
            lambda *args, **options: logprobs(*args, **options | {"loss": None}),
        )
        whole = learn(policy, batch, loss, N)
    multiplied = []
    multiply = Head.multiply
    monkeypatch.setattr(Head, "multiply", lambda *args: [multiplied.append(1), multiply(*args)])
    monkeypatch.setitem(completion_logprobs.__kwdefaults__, "chunk_tokens", 7)
    assert_same_step(whole, learn(policy, batch, loss, N), exactness=1e-12)
    chunks = -(-int(batch.rollout.lengths.sum()) // 7)
    assert len(multiplied) == (chunks if level == "token" else 2 * chunks) > 4


def test_i1_a_split_by_hand_with_plain_forward_passes_gives_the_same_gradient(load, prompts):
    """dapo without clipping in effect, one row at a time, in a few lines of plain torch."""
    policy = load("gpt2", "fp64")
    batch = dataclasses.replace(frozen_batch(policy, prompts), old_logp=None)
    gradient, _ = learn(policy, dataclasses.replace(batch, ref_logp=None), LossSettings(kl_coef=0.0), 5)
    policy.model.zero_grad(set_to_none=True)
    sampled, tokens = batch.rollout, int(batch.mask.sum())
    for row in batch.mask.any(1).nonzero().flatten().tolist():
        completion = sampled.completion_ids[row, : sampled.lengths[row]].tolist()
        prompt = sampled.prompt_ids[row // G]
        logits = policy.model(input_ids=torch.tensor([prompt + completion]), use_cache=False).logits[0]
        logp = logits[len(prompt) - 1 : -1].log_softmax(-1)[range(len(completion)), completion]
        weight = (logp.detach() - sampled.sampler_logp[row, : len(completion)]).exp()  # 1 but for rounding
        (-batch.advantages[row] * (logp * weight).sum() / tokens).backward()
    by_hand = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    assert (gradient - by_hand).norm() < 1e-12 * by_hand.norm()


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_i1_in_fp32_to_rounding(load, prompts, architecture):
    policy = load(architecture, "fp32")
    batch = frozen_batch(policy, prompts)
    whole = learn(policy, batch, LossSettings(kl_coef=0.1), N)
    for rows in (1, 2, 3, 5, 7, 11):
        assert_same_step(whole, learn(policy, batch, LossSettings(kl_coef=0.1), rows), exactness=1e-5)


# --------------------------------------------------------------------------------------- I2 sampling


@pytest.fixture(scope="module")
def references(model_folders, prompts):
    """For each architecture the policy, its uniforms, and what comes out when all rows decode together."""
    from conftest import CPU, let_norms_be_exact

    from grpo.model.load import load_policy

    made = {}
    for name in ARCHITECTURES:
        policy = load_policy(str(model_folders[name]), CPU, "fp64")
        let_norms_be_exact(policy.model)
        uniforms = step_uniforms(N, LENGTH, seed=0, step=1)
        sampled = sample(policy, prompts, uniforms, rows=N)
        assert len(sampled.lengths.unique()) > 4 and 2 < sampled.terminated.sum() < N
        made[name] = policy, uniforms, sampled
    return made


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@HARD
@given(rows=st.integers(1, 2 * N), order=st.permutations(range(4)))
@example(rows=1, order=[0, 1, 2, 3])
@example(rows=G, order=[3, 2, 1, 0])
@example(rows=N, order=[2, 0, 3, 1])
def test_i2_tokens_do_not_depend_on_rows_or_order(references, prompts, architecture, rows, order):
    """As long as each row keeps its uniforms. Groups end at different times, so `keep` is at work."""
    policy, uniforms, reference = references[architecture]
    places = torch.tensor([group * G + row for group in order for row in range(G)])
    sampled = sample(policy, [prompts[group] for group in order], uniforms[places], rows=rows)
    assert torch.equal(sampled.completion_ids, reference.completion_ids[places])
    assert torch.equal(sampled.lengths, reference.lengths[places])
    assert torch.equal(sampled.terminated, reference.terminated[places])
    assert sampled.completions == [reference.completions[place] for place in places]
    assert torch.allclose(sampled.sampler_logp, reference.sampler_logp[places], atol=1e-12, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_i2_tokens_do_not_depend_on_who_is_beside_them(references, prompts, architecture):
    """Each prompt alone, and with others that end early or late."""
    policy, uniforms, reference = references[architecture]
    for groups in ([0], [1], [2], [3], [1, 3], [0, 2, 3]):
        places = torch.tensor([group * G + row for group in groups for row in range(G)])
        sampled = sample(policy, [prompts[group] for group in groups], uniforms[places], rows=100)
        width = sampled.completion_ids.shape[1]
        assert torch.equal(sampled.completion_ids, reference.completion_ids[places, :width])
        assert torch.equal(sampled.lengths, reference.lengths[places])


def test_i2_siblings_differ_and_so_do_steps(references, prompts):
    policy, _, reference = references["gpt2"]
    assert len({tuple(row) for row in reference.completion_ids.tolist()}) == N
    later = sample(policy, prompts, step_uniforms(N, LENGTH, seed=0, step=2), rows=N)
    assert not torch.equal(later.completion_ids, reference.completion_ids)


def test_i2_a_row_that_has_ended_says_no_more(references):
    """After end-of-text: nothing, in tokens, log-probs, and text."""
    policy, _, reference = references["gpt2"]
    end = policy.tokenizer.eos_token_id
    for row, length in enumerate(reference.lengths.tolist()):
        ids = reference.completion_ids[row]
        assert (ids[: length - 1] != end).all() and (ids[length:] == 0).all()
        assert reference.terminated[row] == (ids[length - 1] == end)
        assert reference.terminated[row] or length == LENGTH
        assert (reference.sampler_logp[row, length:] == 0).all()
        assert reference.completions[row] == policy.tokenizer.decode(ids[:length], skip_special_tokens=True)


# ----------------------------------------------------------------------------------- I5 interruption

STEPS = 5
KNIGHTS = """
def knights(completions, **kwargs):  # often the same for a whole group
    return [float("n" in completion) for completion in completions]
"""
VARIANTS = {
    "plain": {},
    # everything that a step remembers of the steps before
    "rich": {
        "num_iterations": 2, "kl_target": 0.01, "refill_groups": 2, "importance_cap": 2.0,
        "optimizer": OptimizerSettings(lr_schedule="cosine", warmup_steps=2, learning_rate=2e-3),
    },
}  # fmt: skip


class Killed(BaseException):
    """What no `except Exception` sees, as with a real kill."""


def train(config, *, stop_after=None, kill_in=None, killer: type[BaseException] = Killed) -> Path:
    """Run in this process; ask to stop during a step, or die in the middle of one."""
    stop = StopRequest()
    stop.requested = stop_after == 0
    with open_run(config) as run:
        trainer = Trainer(run, Console(quiet=True))
        log, score_step = trainer.log, trainer.score

        def log_then_ask_to_stop(step, *rest):
            stop.requested |= step == stop_after
            log(step, *rest)

        def score_or_die(*rest):
            if trainer.finished + 1 == kill_in:
                raise killer
            return score_step(*rest)

        trainer.log, trainer.score = log_then_ask_to_stop, score_or_die
        try:
            trainer.train(stop)
        except killer:
            assert kill_in is not None
        return run.folder


def outcome(folder: Path) -> dict:
    """All that a run leaves behind, apart from times, memory and its settings, with its name."""
    last = folder / "checkpoints" / f"step-{STEPS:06d}"
    passing = ("timing/", "memory/", "step_time")
    metrics = [
        {name: value for name, value in record.items() if not name.startswith(passing)}
        for record in read_lines(folder / METRICS_FILE)
    ]
    assert [record["step"] for record in metrics if "reward" in record] == [*range(1, STEPS + 1)]
    state = json.loads((last / "trainer.json").read_text())
    assert state.pop("settings")["name"] == folder.name and state.pop("trained_s") > 0
    return {
        "weights": load_file(last / "model.safetensors"),
        "optimizer": load_file(last / "trainer.safetensors"),
        "state": state,
        "metrics": metrics,
        "completions": read_lines(folder / COMPLETIONS_FILE),
    }


def assert_same_outcome(one: dict, other: dict) -> None:
    """Bit for bit."""
    for part in ("weights", "optimizer"):
        assert one[part].keys() == other[part].keys()
        for name, tensor in one[part].items():
            assert torch.equal(tensor, other[part][name]), name
    for part in ("state", "metrics", "completions"):
        assert one[part] == other[part]


@pytest.fixture(params=VARIANTS)
def run_config(request, config, tmp_path):
    (tmp_path / "mine.py").write_text(KNIGHTS)
    config = dataclasses.replace(
        config, steps=STEPS, reward=("policy", "environment", f"{tmp_path}/mine.py:knights"),
        optimizer=OptimizerSettings(learning_rate=2e-3), keep_checkpoints=9,
    )  # fmt: skip
    return dataclasses.replace(config, **VARIANTS[request.param])


def test_i5_an_interrupted_run_ends_as_one_that_was_not(run_config):
    """Stopped politely, or killed in the middle of a step after a checkpoint, anywhere, even twice."""
    straight = outcome(train(dataclasses.replace(run_config, name="straight")))
    first, last = straight["metrics"][0], straight["metrics"][-1]
    assert first["step"] == 0 and last["step"] == STEPS and "eval_reward" in last
    count = itertools.count()

    @settings(HARD, max_examples=4)
    @given(cut=st.integers(1, STEPS - 1), politely=st.booleans(), interval=st.integers(1, 2))
    @example(cut=2, politely=True, interval=1)
    @example(cut=3, politely=False, interval=2)  # the step after the checkpoint is done twice
    def interrupted(cut, politely, interval):
        name = f"cut-{next(count)}"
        config = dataclasses.replace(run_config, name=name, checkpoint_interval=interval)
        folder = train(config, stop_after=cut if politely else None, kill_in=None if politely else cut + 1)
        if not any((folder / "checkpoints").glob("step-*")):
            return  # killed before the first checkpoint: nothing to go on from
        resumed = dataclasses.replace(config, resume=folder)
        assert_same_outcome(straight, outcome(train(resumed)))

    interrupted()


def test_i5_a_stop_before_the_first_step_can_be_resumed(run_config):
    """Ctrl-C while the model loads or is evaluated: the checkpoint is the beginning."""
    straight = outcome(train(dataclasses.replace(run_config, name="straight")))
    config = dataclasses.replace(run_config, name="early")
    folder = train(config, stop_after=0)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000000"]
    assert_same_outcome(straight, outcome(train(dataclasses.replace(config, resume=folder))))


class AskedLate(StopRequest):
    """Somebody asks to stop after this has been looked at so many times."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    @property
    def requested(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize("looks", range(5))
def test_i5_whenever_somebody_asks_to_stop_what_is_finished_is_saved(config, looks):
    config = dataclasses.replace(config, steps=2, checkpoint_interval=0, eval_interval=0)
    with open_run(config) as run:
        trainer = Trainer(run, Console(quiet=True))
        trainer.train(AskedLate(looks))
        assert run.checkpoints.newest_intact().state["step"] == trainer.saved == trainer.finished
        assert trainer.interrupted == (trainer.finished < 2)
        assert trainer.finished == max(0, min(2, looks - 1))


def test_i5_tokens_of_half_a_step_are_not_counted(config, monkeypatch):
    config = dataclasses.replace(config, checkpoint_interval=0, eval_interval=0)
    with open_run(config) as run:
        trainer, calls = Trainer(run, Console(quiet=True)), itertools.count(1)
        accumulate = trainer.phases.accumulate

        def fails(*arguments, **options):
            if next(calls) == 3:
                raise ZeroDivisionError
            return accumulate(*arguments, **options)

        monkeypatch.setattr(trainer.phases, "accumulate", fails)
        with pytest.raises(ZeroDivisionError):
            trainer.train(StopRequest())
        saved = run.checkpoints.newest_intact().state
        last = [line for line in read_lines(run.folder / METRICS_FILE) if "num_tokens" in line][-1]
        assert saved["step"] == last["step"] == 2 and saved["num_tokens"] == last["num_tokens"] > 0


def test_i5_after_an_error_the_last_whole_step_is_saved(run_config):
    """The step in which it happened is done again, from the beginning."""
    straight = outcome(train(dataclasses.replace(run_config, name="straight")))
    config = dataclasses.replace(run_config, name="error", checkpoint_interval=0, eval_interval=0)
    folder = train(config, kill_in=4, killer=ZeroDivisionError)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000003"]
    again = outcome(train(dataclasses.replace(config, resume=folder)))
    for part in ("weights", "optimizer"):
        assert all(torch.equal(tensor, again[part][name]) for name, tensor in straight[part].items())


def test_i5_half_a_step_is_never_saved(config, monkeypatch):
    """An error between the two updates of step 3: its weights are neither step 2's nor step 3's."""
    config = dataclasses.replace(config, num_iterations=2, checkpoint_interval=0, eval_interval=0)
    calls = itertools.count(1)

    def step(self, accumulate):
        if next(calls) == 6:
            raise ZeroDivisionError
        return original(self, accumulate)

    original = Stepper.step
    monkeypatch.setattr(Stepper, "step", step)
    with open_run(config) as run, pytest.raises(ZeroDivisionError):
        Trainer(run, Console(quiet=True)).train(StopRequest())
    assert run.checkpoints.all() == []


def test_i5_the_best_so_far_is_remembered(config):
    """Else a resumed run would call its first evaluation the best, however bad."""
    folder = train(config, stop_after=2)
    best = max(r["eval_reward"] for r in read_lines(folder / METRICS_FILE) if "eval_reward" in r)
    with open_run(dataclasses.replace(config, resume=folder)) as run:
        trainer = Trainer(run, Console(quiet=True))
        assert trainer.best_reward == best
        trainer.journal = Journal(run, trainer.console, trainer.progress, finished=trainer.finished)
        trainer.best_reward = best + 1
        assert trainer.evaluate(3) is False and trainer.best_reward == best + 1


def test_i5_is_no_accident(run_config):
    """The same comparison tells runs of two seeds apart, and the reward is no constant."""
    one = outcome(train(dataclasses.replace(run_config, name="one")))
    other = outcome(train(dataclasses.replace(run_config, name="other", seed=1)))
    refilled = one["state"]["source"]["num_drawn"] > STEPS * run_config.num_prompts
    assert refilled == (run_config.refill_groups > 0)
    with pytest.raises(AssertionError):
        assert_same_outcome(one, other)
    assert len({record["reward"] for record in one["metrics"] if "reward" in record}) > 2
    assert all(math.isfinite(record["loss"]) for record in one["metrics"] if "loss" in record)


def test_i1_and_i2_together_a_whole_run_does_not_depend_on_its_rows(config):
    """Two float64 runs of a few steps, whose plans have nothing in common, end with the same weights."""
    config = dataclasses.replace(config, steps=STEPS, precision="fp64", reward=("policy", "environment"))
    one = outcome(train(dataclasses.replace(config, name="one")))
    rows = {"rollout_rows": 2, "score_rows": 4, "train_rows": 1}
    other = outcome(train(dataclasses.replace(config, name="other", **rows)))
    assert [r["completion"] for r in one["completions"]] == [r["completion"] for r in other["completions"]]
    for name, tensor in one["weights"].items():
        assert torch.allclose(tensor, other["weights"][name], rtol=1e-6, atol=1e-9), name


def test_prompts_of_one_text_are_told_apart_by_their_rows(references):
    """Two groups of the same prompt sample different completions: uniforms belong to rows, not texts."""
    policy, _, _ = references["gpt2"]
    twins = [Prompt("a", "P: 8/8/8/8/8/8/8/8 w - - 0 1", {})] * 2
    sampled = sample(policy, twins, step_uniforms(2 * G, LENGTH, seed=0, step=1), rows=100)
    assert sampled.completions[:G] != sampled.completions[G:]
