"""The same completions given to stock TRL, all at once, and to ours, in parts: the same steps, in float64.

Every loss, level, KL, accumulation and number of iterations is here with every other value of one setting;
`scripts/benchmark_trl.py equal` does all 384.
"""

import pytest
import torch
from benchmarks.trl_cases import GROUP, LOSSES, Case, Ours, Stock, difference, make, rows_at_once, run

pytestmark = pytest.mark.usefixtures("own_accelerator")
SIZES = GROUP, 3 * GROUP, GROUP // 2
BONUS = (("entropy_coef", 0.05),)
CASES = [
    *(
        Case(loss, ("token", "sequence")[i % 2], (0.0, 0.04)[i // 2 % 2], 1 + i // 4 % 2, 1 + i % 3 % 2)
        for i, loss in enumerate(LOSSES)
    ),
    Case("grpo", "sequence", 0.04, 2, 2),
    Case("dapo", "token", 0.04, 2, 1, BONUS),
    Case("grpo", "token", 0.0, 2, 2, BONUS),
    Case("bnpo", "token", 0.0, 2, 1, (*BONUS, ("mask_truncated_completions", True))),
    Case(
        "dapo", more=(("use_adaptive_entropy", True), ("entropy_target", 1.2), ("entropy_coef_delta", 0.02))
    ),
    Case("grpo", "token", 0.04, more=(("use_bias_correction_kl", True), ("delta", 1.5))),
    Case("dapo", "token", 0.0, 1, 2, (("off_policy_mask_threshold", 0.01), ("steps_per_generation", 4))),
]


@pytest.mark.parametrize(
    ("number", "case"), [*enumerate(CASES)], ids=[f"{c.loss}-{i}" for i, c in enumerate(CASES)]
)
def test_a_step_in_parts_is_stock_trls_step(number, case):
    ours = run(Ours, case, prepare=rows_at_once(SIZES[number % 3]))
    parameters, logged = difference(run(Stock, case), ours)
    assert parameters < 1e-10 and logged < 1e-10
    assert {entry["kl"] > 0 for entry in ours["logged"][1:] if case.beta} <= {True}


class Faults:
    """Memory runs out at one of a trainer's passes, forward and backward counted together."""

    def __init__(self, at: int | None) -> None:
        self.at, self.passes = at, 0

    def __call__(self, trainer) -> None:
        rows_at_once(2 * GROUP)(trainer)
        faults = self

        class Passing(torch.autograd.Function):
            @staticmethod
            def forward(ctx, hidden):
                faults.one()
                return hidden.clone()

            @staticmethod
            def backward(ctx, gradient):
                faults.one()
                return gradient

        trainer.model.transformer.ln_f.register_forward_hook(
            lambda module, given, hidden: Passing.apply(hidden)
        )

    def one(self) -> None:
        self.passes += 1
        if self.passes == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    "case",
    [
        Case("bnpo", "token", 0.04, 2, more=(("max_steps", 1), *BONUS)),
        Case("dapo", more=(("max_steps", 1), ("use_adaptive_entropy", True), ("entropy_target", 1.2))),
    ],
    ids=["bnpo", "adaptive"],
)
def test_memory_that_runs_out_at_any_pass_changes_nothing(case):
    stock, counted = run(Stock, case), Faults(None)
    assert difference(stock, run(Ours, case, prepare=counted)) < (1e-10, 1e-10)
    assert counted.passes >= 6
    for at in range(1, counted.passes + 1):
        faults = Faults(at)
        assert max(difference(stock, run(Ours, case, prepare=faults))) < 1e-10, f"at pass {at}"
        assert faults.passes > counted.passes


def test_an_evaluation_in_parts_is_stock_trls(capsys):
    case = Case("grpo", "token", 0.04)
    found = []
    for kind in (Stock, Ours):
        trainer = make(kind, case)
        trainer.eval_dataset = trainer.train_dataset
        if kind is Ours:
            rows_at_once(GROUP)(trainer)
        found.append(trainer.evaluate())
    stock, ours = found
    for name in ("eval_loss", "eval_kl", "eval_entropy", "eval_reward", "eval_clip_ratio/low_min"):
        assert ours[name] == pytest.approx(stock[name], abs=1e-9), name
