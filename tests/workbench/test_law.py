"""Memory over the batch size as a line: the published law, where a line ends, which sizes are beyond it."""

import pytest

from grpo.memory.budget import GB
from grpo.workbench.maximum.findings import (
    Findings,
    cards_table,
    next_table,
    recommendation_table,
    recommendations,
    sentences,
)
from grpo.workbench.maximum.law import (
    explaining_margin,
    fit_law,
    leaves_the_line,
    r_squared,
    risk,
    unseen_margin,
)

# As the manual recipe published them: a device of 47.4 GB, out of memory at 208.
PUBLISHED = dict(
    zip(
        range(64, 193, 16),
        (GB * peak for peak in (14.80, 18.08, 21.36, 24.64, 27.92, 31.21, 34.49, 37.77, 41.06)),
        strict=True,
    )
)
DEVICE = 47.4 * GB


def first(count):
    return dict(list(PUBLISHED.items())[:count])


def published(**changes):
    given = {"peaks": PUBLISHED, "failed": [208], "total_bytes": DEVICE, "multiple": 1}
    return Findings(**{**given, "margin_bytes": unseen_margin(DEVICE, "cuda"), **changes})


def test_the_published_law_follows_from_its_first_three_points():
    law = fit_law(first(3))
    assert law.bytes_per_sample / GB == pytest.approx(0.2052, rel=0.01)
    assert law.start_bytes / GB == pytest.approx(14.80, rel=0.001)
    assert r_squared(law, PUBLISHED) >= 0.9999
    assert leaves_the_line(PUBLISHED) is None


def test_208_is_a_risk_and_224_certain_though_the_line_has_room_for_208():
    law, margin = fit_law(first(3)), unseen_margin(DEVICE, "cuda")
    assert law(208) / GB == pytest.approx(44.3, abs=0.05) and law(208) < DEVICE
    by_size = {size: risk(law, size, DEVICE, margin) for size in (176, 192, 208, 224)}
    assert by_size == {176: "fits", 192: "fits", 208: "likely", 224: "certain"}


def test_the_margin_that_would_have_predicted_a_failure_is_said():
    law = fit_law(PUBLISHED)
    assert explaining_margin(law, [224, 208], DEVICE) / GB == pytest.approx(47.4 - 44.34, abs=0.01)
    assert explaining_margin(law, [], DEVICE) is None
    said = " ".join(sentences(published()))
    assert "208 ran out of memory where the line puts 44.34 GB, of 47.40: a margin of 3.06 GB (6.5%)" in said
    assert "is enough" in said
    assert "was not" in " ".join(sentences(published(margin_bytes=GB)))


def test_where_it_stops_being_a_line():
    bent = {**first(5), 144: PUBLISHED[144] + 2 * GB}
    assert leaves_the_line(bent) == 144
    assert "stops being a line at 144" in " ".join(sentences(published(peaks=bent, failed=[])))
    assert leaves_the_line(first(3)) is None


def test_r_squared_by_hand():
    law = fit_law({1: 1.0, 2: 2.0, 3: 3.0})
    assert r_squared(law, {1: 1.0, 2: 2.0, 3: 4.0}) == pytest.approx(1 - 1 / (14 / 3))
    assert fit_law({1: 1.0, 2: 3.0, 3: 2.0}).r_squared == pytest.approx(0.25)


def test_a_line_needs_two_sizes_and_must_rise():
    with pytest.raises(ValueError, match="there are 1"):
        fit_law({64: 1.0})
    flat = published(peaks={8: 5.0 * GB, 16: 5.0 * GB}, failed=[])
    assert flat.law is None and flat.next_sizes() == []
    assert "No line" in " ".join(sentences(flat))


def test_the_next_sizes_are_those_around_the_edge():
    assert published(peaks=first(3), failed=[]).next_sizes() == [112, 128, 208, 224]
    assert published().next_sizes() == [208, 224]
    table = next_table(published())
    assert list(table.columns[2].cells) == ["yes, tried", "certain"]


def test_recommendations_are_whole_groups():
    found = published(multiple=8, peaks={96: 10 * GB, 104: 11 * GB}, failed=[])
    assert recommendations(found) == {
        "full": {"rows": 104, "accumulate": 1, "batch_size": 104},
        "safe": {"rows": 80, "accumulate": 1, "batch_size": 80},
        "accumulated": {"rows": 48, "accumulate": 2, "batch_size": 96},
    }
    assert list(cards_table(found).columns[1].cells) == ["80", "160", "320", "640"]


def test_a_maximum_that_was_to_be_no_larger_says_so():
    assert "--max-batch-size" in sentences(published(at_most=192))[0]
    assert "--max-batch-size" not in sentences(published(at_most=256))[0]


def test_on_a_host_the_margin_is_the_scatter_alone():
    assert unseen_margin(100.0, "cpu") == pytest.approx(2.0)
    assert unseen_margin(100 * GB, "cuda") == pytest.approx(6.5 * GB)


def test_commands_say_what_the_sizes_hold_with():
    found = published(flags=" --lora-rank 4")
    for table in (recommendation_table(found), cards_table(found)):
        commands = [*table.columns[-1].cells]
        assert commands and all(command.endswith(" --lora-rank 4") for command in commands)


def test_where_no_command_does_what_was_tried_there_is_none():
    found = published(no_command="it trains chess alone")
    assert "No command of train_lean.py is recommended: it trains chess alone." in sentences(found)
    assert [column.header for column in recommendation_table(found).columns][-1] == "batch"
    assert all("YOUR_SCRIPT" in command for command in cards_table(found).columns[-1].cells)
