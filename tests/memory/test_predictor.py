"""Fits reproduce what they are fits of; measurements correct them, and their scatter is the error."""

import json
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo.memory import Predictor, Shape
from grpo.memory import predictor as module
from grpo.memory.fit import Moment, PhaseFit, align
from grpo.memory.predictor import LEAST_ERROR, REMEMBERED
from grpo.memory.shape import decoding_features, decoding_shapes, pass_features, pass_shapes

CHUNK = 1024
IN_CHUNKS = partial(pass_features, chunk_tokens=CHUNK)
UNCALIBRATED = 0.05


@pytest.fixture(autouse=True)
def errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UNCALIBRATED_ERROR", UNCALIBRATED)


Formula = Callable[[Shape], float]


def formula(
    fixed: float, chunk: float, row: float, p: float, c: float, pc: float, cc: float, pp: float
) -> Formula:
    def peak(shape: Shape) -> float:
        r, prompt, new, scored, _ = shape
        of_row = row + p * prompt + c * new + pc * prompt * new + cc * new**2 + pp * prompt**2
        return fixed + chunk * min(r * new if scored is None else scored, CHUNK) + r * of_row

    return peak


# Each is the highest somewhere: attention for long prompts, the head for few rows, the MLP in between.
OPERATIONS = {
    "attention": formula(1e4, 0, 900, 300, 200, 9, 4, 6),
    "mlp": formula(5e4, 0, 4000, 1000, 900, 0, 0, 0),
    "head": formula(8e5, 700, 100, 350, 300, 0, 0, 0),
}
LONGEST = Shape(8, 120, 144)
UNSEEN = [
    Shape(r, p, c, scored)
    for r in (8, 24, 200)
    for p in (25, 77, 110)
    for c in (20, 64, 140)
    for scored in (None, r * c // 2)  # not all completions are of full length
]


def traces(
    operations: dict[str, Formula], longest: Shape = LONGEST, group_size: int = 8
) -> list[tuple[Shape, dict[Moment, float]]]:
    shapes = pass_shapes(longest, group_size=group_size, chunk_tokens=CHUNK)
    return [(shape, {(name, 0): peak(shape) for name, peak in operations.items()}) for shape in shapes]


def test_the_largest_of_several_formulas_is_found_exactly_at_shapes_no_fit_saw():
    fit = PhaseFit(traces(OPERATIONS), IN_CHUNKS)
    highest = set()
    for shape in UNSEEN:
        peaks = {name: peak(shape) for name, peak in OPERATIONS.items()}
        highest.add(max(peaks, key=peaks.__getitem__))
        assert fit(shape) == pytest.approx(max(peaks.values()), rel=1e-6), shape
    assert highest == {"attention", "mlp", "head"}


def test_operations_done_equally_often_divide_the_work_and_in_between_are_its_loops():
    once = [("embed", 1), ("mm", 2), ("head", 9), ("exp", 8), ("mm", 7), ("sum", 3)]
    twice = [*once[:2], ("head", 9), ("exp", 6), ("head", 12), ("exp", 5), ("mm", 9), ("sum", 5)]
    first = {("embed", 0): 1, ("mm", 1): 2}  # embed, mm, mm and sum are done as often in both
    assert align([once, twice]) == [
        {**first, ("head", 2): 9, ("exp", 2): 8, ("mm", 2): 7, ("sum", 3): 3},
        {**first, ("head", 2): 12, ("exp", 2): 6, ("mm", 2): 9, ("sum", 3): 5},
    ]


@pytest.mark.parametrize(("ratio", "beyond"), [(0.98, -20.0), (1.04, 40.0), (0.9, -400.0), (1.6, 2400.0)])
def test_a_small_error_is_bytes_and_a_large_one_a_slope(ratio: float, beyond: float):
    """Measured at 1,000 bytes, predicted for 4,000: as many bytes off, or as much in proportion."""
    predictor = Predictor({"learn": lambda shape: 10.0 * shape.rows})
    predictor.observe("learn", Shape(100, 1, 1), ratio * 1000)
    assert predictor.predict("learn", Shape(100, 1, 1)).peak_bytes == pytest.approx(ratio * 1000)
    assert predictor.predict("learn", Shape(50, 1, 1)).peak_bytes == pytest.approx(ratio * 500)
    assert predictor.predict("learn", Shape(400, 1, 1)).peak_bytes == pytest.approx(4000 + beyond)


def test_a_loops_last_round_of_another_size_is_no_moment_of_its_own():
    """A sum over what a last chunk of 1 to 1,024 tokens holds is no formula; over the largest chunk it is."""
    shapes = pass_shapes(LONGEST, group_size=8, chunk_tokens=CHUNK)

    def log(shape: Shape) -> list[tuple[str, int]]:
        tokens = shape.rows * shape.new_tokens
        chunks = [min(CHUNK, tokens - start) for start in range(0, tokens, CHUNK)]
        return [("head", 500 * chunk + 30 * tokens) for chunk in chunks]

    fit = PhaseFit(list(zip(shapes, align([log(shape) for shape in shapes]), strict=True)), IN_CHUNKS)
    for shape in UNSEEN:
        if shape.scored_tokens is None:
            assert fit(shape) == pytest.approx(max(held for _, held in log(shape)), rel=1e-3), shape


def test_without_a_chunk_the_head_is_no_part_of_it():
    shapes = {"mlp": OPERATIONS["mlp"]}
    assert PhaseFit(traces(shapes))(Shape(64, 50, 50)) == pytest.approx(OPERATIONS["mlp"](Shape(64, 50, 50)))


def test_an_operation_that_never_comes_near_the_peak_or_is_not_always_there_is_left_out():
    known = PhaseFit(traces(OPERATIONS), IN_CHUNKS)
    seen = traces({**OPERATIONS, "small": lambda shape: 1.0 + shape.rows**2})
    seen[0][1]["once", 0] = 2e6
    other = PhaseFit(seen, IN_CHUNKS)
    for shape in UNSEEN:
        assert other(shape) == pytest.approx(known(shape))


def test_what_is_small_at_the_designed_shapes_may_be_the_peak_of_many_rows():
    """As a large vocabulary's head hides a layer until hundreds of rows are scored at once."""
    layer = formula(0, 0, 4000, 100, 100, 0, 0, 0)
    fit = PhaseFit(traces({"head": formula(8e7, 700, 0, 0, 0, 0, 0, 0), "layer": layer}), IN_CHUNKS)
    few, many = Shape(64, 120, 144), Shape(4096, 120, 144)
    assert layer(few) < 0.1 * fit(few) and fit(many) == pytest.approx(layer(many)) and layer(many) > 1e8


def test_a_fit_needs_traces():
    with pytest.raises(ValueError, match="at least one traced shape"):
        PhaseFit([])


@given(group_size=st.integers(2, 16), prompt=st.integers(20, 2000), new=st.integers(10, 200))
def test_every_coefficient_follows_from_the_designed_shapes(group_size: int, prompt: int, new: int):
    shapes = pass_shapes(Shape(1, prompt, new), group_size=group_size, chunk_tokens=CHUNK)
    assert max(shape.prompt_tokens for shape in shapes) == prompt
    assert max(shape.new_tokens for shape in shapes) == new
    assert all(shape.rows % group_size == 0 for shape in shapes) and len(shapes) == 11
    features = np.stack([IN_CHUNKS(shape) for shape in shapes])
    assert np.linalg.matrix_rank(features / features.max(0)) == features.shape[1]


@given(group_size=st.integers(1, 16), prompt=st.integers(12, 2000), new=st.integers(10, 2000))
def test_every_coefficient_of_decoding_follows_too(group_size: int, prompt: int, new: int):
    shapes = decoding_shapes(Shape(1, prompt, new), group_size=group_size)
    assert max(shape.prompt_tokens for shape in shapes) == prompt
    assert max(shape.new_tokens for shape in shapes) == new
    assert all(shape.rows % group_size == 0 and shape.rows > group_size for shape in shapes)
    joined = [shape._replace(joining_groups=max(1, shape.rows // group_size // 8)) for shape in shapes]
    features = np.stack([decoding_features(shape) for shape in joined])
    assert np.linalg.matrix_rank(features / features.max(0)) == features.shape[1]


@pytest.mark.parametrize("new", [4, 10, 30])
def test_short_completions_are_predicted_for_many_rows_too(new: int):
    """Their tokens fill the head's chunk only where rows are many."""
    peak = formula(1e5, 2000, 4000, 1000, 9000, 0, 0, 0)
    fit = PhaseFit(traces({"mlp": peak}, Shape(4, 60, new), 4), IN_CHUNKS)
    for rows in (4, 32, 256, 1024):
        shape = Shape(rows, 60, new)
        assert fit(shape) >= 0.99 * peak(shape)
        assert fit(shape) <= 1.05 * peak(shape)


# ------------------------------------------------------------------------------------ the predictor


@pytest.fixture(autouse=True)
def no_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes here are few."""
    monkeypatch.setattr(module, "LEAST_ERROR_BYTES", 0.0)


def test_scratch_space_that_no_trace_sees_is_allowed_for():
    made = Predictor({"learn": lambda shape: 10.0 * shape.rows}, scratch_bytes={"learn": 7.0})
    assert made.predict("learn", SHAPE).error_bytes == 7.0
    made.observe("learn", SHAPE, 80.0)
    assert made.predict("learn", SHAPE).error_bytes == 7.0


def test_a_small_shape_weighs_little():
    made = predictor()
    for rows, ratio in ((1, 0.5), (2, 0.5), (64, 1.1)):
        made.observe("learn", Shape(rows, 50, 20), ratio * 10 * rows)
    assert made.predict("learn", SHAPE).peak_bytes == pytest.approx(1.1 * 80)


def predictor(bias: float = 1.0) -> Predictor:
    return Predictor(
        {"learn": lambda shape: 10.0 * shape.rows, "score": lambda shape: 5.0 * shape.rows}, bias=bias
    )


SHAPE = Shape(8, 50, 20)


def test_before_anything_is_measured_the_fit_counts_and_its_error_is_the_usual_one():
    prediction = predictor().predict("learn", SHAPE)
    assert prediction.peak_bytes == 80 and prediction.error_bytes == UNCALIBRATED * 80
    assert prediction.upper_bytes == 84
    with pytest.raises(KeyError):
        predictor().predict("dream", SHAPE)


def test_measured_peaks_correct_a_phase_by_their_median():
    made = predictor()
    for shape, measured in ((SHAPE, 96.0), (Shape(16, 50, 20), 192.0), (SHAPE, 96.0), (SHAPE, 800.0)):
        made.observe("learn", shape, measured)  # 1.2, 1.2, 1.2, and one that went wrong
    assert made.predict("learn", Shape(4, 9, 9)).peak_bytes == pytest.approx(48)
    assert made.predict("score", SHAPE).peak_bytes == 40


def test_the_error_is_the_scatter_and_narrows_with_each_measurement():
    made = predictor()
    errors = []
    for _ in range(9):
        made.observe("learn", SHAPE, 80.0)
        errors.append(made.predict("learn", SHAPE).error_bytes / 80)
    assert errors[:3] == pytest.approx([0.05 / 2, 0.05 / 3, 0.05 / 4])
    assert errors[-1] == LEAST_ERROR  # never below

    for measured in (72.0, 88.0) * 10:  # ten percent off, either way: 95 % of them within that
        made.observe("learn", SHAPE, measured)
    prediction = made.predict("learn", SHAPE)
    assert prediction.peak_bytes == pytest.approx(80)
    assert prediction.error_bytes / 80 == pytest.approx(0.1 + 0.05 / 30)


def test_a_wrong_prediction_is_mended_by_one_measurement():
    made = predictor(bias=0.6)
    assert made.predict("learn", SHAPE).peak_bytes == pytest.approx(48)
    made.observe("learn", SHAPE, 80.0)
    assert made.predict("learn", Shape(16, 1, 1)).peak_bytes == pytest.approx(160)


def test_the_newest_measurements_count():
    made = predictor()
    for measured in [160.0] * REMEMBERED + [80.0] * REMEMBERED:
        made.observe("learn", SHAPE, measured)
    assert made.predict("learn", SHAPE).peak_bytes == 80


def test_a_phase_that_held_nothing_teaches_nothing():
    made = predictor()
    made.observe("learn", SHAPE, 0.0)
    made.observe("learn", Shape(0, 1, 1), 80.0)
    assert made.predict("learn", SHAPE).error_bytes == UNCALIBRATED * 80


def test_what_was_measured_survives_a_checkpoint():
    made, other = predictor(), predictor()
    for measured in (90.0, 91.0, 99.0):
        made.observe("learn", SHAPE, measured)
    other.observe("score", SHAPE, 1000.0)  # forgotten: it is no part of the state
    other.restore(json.loads(json.dumps({**made.state(), "a phase of before": [1.0]})))
    for phase in ("learn", "score"):
        assert other.predict(phase, SHAPE) == made.predict(phase, SHAPE)
