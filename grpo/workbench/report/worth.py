"""Which batch of a sweep gets on fastest: as noise and seconds predict it, and as it was measured."""

from statistics import median

from grpo.workbench.report.findings import common_quality, quality_text, seconds_to_reach
from grpo.workbench.report.read import Sweep
from grpo.workbench.report.sections import Section, Table
from grpo.workbench.report.trend import seconds_per_update
from grpo.workbench.report.wording import cell, duration, listed, number, share

TITLE = "Worth it"


def worth_section(sweep: Sweep) -> Section:
    """Signal in a step by its noise (B / (B + noise scale)), beside the time to what all reached."""
    seconds = {size.batch_size: each for size in sweep.finished if (each := seconds_per_update(size))}
    scales = [size.noise_scale for size in sweep.finished if size.noise_scale]
    target = common_quality(sweep)
    if len(seconds) < 2 or not scales or target is None:
        return Section(TITLE)
    noise = median(scales)
    signal = {size: size / (size + noise) for size in seconds}
    progress = {size: signal[size] / seconds[size] for size in seconds}
    reached = {size.batch_size: seconds_to_reach(sweep, size, target) for size in sweep.finished}
    took = {size: each for size, each in reached.items() if size in seconds and each is not None}
    predicted = sorted(progress, key=lambda size: -progress[size])
    measured = sorted(took, key=lambda size: took[size])
    rows = [
        (
            str(size), share(signal[size]), share(progress[size] / progress[predicted[0]]),
            str(1 + predicted.index(size)), cell(took.get(size), duration),
            cell(1 + measured.index(size) if size in took else None, number),
        )
        for size in sorted(progress)
    ]  # fmt: skip
    columns = ("size", "signal in a step", "progress", "predicted rank",
               f"to reach {quality_text(sweep, target)}", "measured rank")  # fmt: skip
    same = [size for size in predicted if size in took] == measured
    sentences = [
        f"The gradient's noise scale was about {number(noise, 2)} rows, the median of the sizes' last. By "
        f"that and the seconds of an update sizes get on in the order {listed(predicted)}; "
        f"{'measured it is the same' if same else f'measured it is {listed(measured)}'}."
    ]
    caption = "Progress is signal a second, in shares of the best."
    return Section(TITLE, sentences, [Table(columns, rows, caption)])
