"""What a sweep's figures say: the best sizes, what failed, what to mind.

Pure: from a `Sweep` to numbers and sentences. Quality is held-out quality at the end, when every size has
done the same work; the best value on the way would favour whoever was looked at most often.
"""

import math

from grpo.memory.budget import readable
from grpo.workbench.report.read import Size, Sweep, points
from grpo.workbench.report.wording import capital, duration, fixed, number, share, sizes

NORMAL_95 = 1.96
ALIKE = 1.1
"""Times as long: what one run of each size, after one another, cannot tell apart."""
NEARLY_AS_GOOD = 0.01
"""The trade-off may cost this share of the best quality, where no noise is known or it is less."""


# --------------------------------------------------------------------------------------- the best sizes


def best_by_quality(sweep: Sweep) -> Size | None:
    """The finished size whose held-out quality ended best."""
    rated = [
        (sweep.sign * size.final_heldout, size) for size in sweep.finished if size.final_heldout is not None
    ]
    return max(rated, key=lambda pair: pair[0])[1] if rated else None


def behind(sweep: Sweep, size: Size, best: Size) -> float:
    """How much worse `size` ended than `best`, at least 0 where `best` is the best."""
    assert size.final_heldout is not None and best.final_heldout is not None
    return sweep.sign * (best.final_heldout - size.final_heldout) + 0.0  # no -0.0


def within_noise(sweep: Sweep, best: Size) -> list[Size]:
    """Other sizes whose difference from `best` is within 1.96 standard errors.

    The errors are those of the held-out set, taken as independent. All sizes are evaluated on the same
    set, so that the true error of a difference is smaller, and what lies outside is surely different.
    """
    close = []
    for size in sweep.finished:
        errors = (size.heldout_stderr, best.heldout_stderr)
        if size is best or size.final_heldout is None or errors[0] is None or errors[1] is None:
            continue
        if behind(sweep, size, best) <= NORMAL_95 * math.hypot(errors[0], errors[1]):
            close.append(size)
    return close


def fastest(sweep: Sweep) -> Size | None:
    """The finished size that needed the least time for the same work."""
    timed = [(size.seconds, size) for size in sweep.finished if size.seconds is not None]
    return min(timed, key=lambda pair: pair[0])[1] if timed else None


def trade_off(sweep: Sweep) -> Size | None:
    """The fastest of those whose quality is within noise of the best, or within 1 % of its value."""
    best = best_by_quality(sweep)
    if best is None or best.final_heldout is None:
        return None
    noise, allowed = within_noise(sweep, best), NEARLY_AS_GOOD * abs(best.final_heldout)
    good = [
        (size.seconds, size)
        for size in sweep.finished
        if size.seconds is not None and size.final_heldout is not None
        and (size is best or size in noise or behind(sweep, size, best) <= allowed)
    ]  # fmt: skip
    return min(good, key=lambda pair: pair[0])[1] if good else None


def seconds_to_reach(sweep: Sweep, size: Size, quality: float) -> float | None:
    """Training time at the first point of its curve that is at least as good; None if there is none.

    The untrained model is no point: a quality that it has already is not one that training reached.
    """
    trained = [point for point in size.curve if point.get("done")]
    seconds, values = points(trained, "seconds", "heldout")
    good = (at for at, value in zip(seconds, values, strict=True) if sweep.sign * (value - quality) >= 0)
    return next(good, None)


def common_quality(sweep: Sweep) -> float | None:
    """The quality that every finished size reached at its end: the worst of them."""
    ends = [sweep.sign * size.final_heldout for size in sweep.finished if size.final_heldout is not None]
    return sweep.sign * min(ends) if len(ends) > 1 else None


def quality_text(sweep: Sweep, value: float) -> str:
    """2.312 nats a token"""
    return f"{fixed(value)} {sweep.quality_unit}".strip()


def best_sentences(sweep: Sweep) -> list[str]:
    """Best by quality with what is within its noise, best by speed, and the trade-off."""
    said = [*_quality_sentences(sweep), *_speed_sentences(sweep), *_trade_off_sentences(sweep)]
    return said or ["No size finished, so there is no best one."]


def _quality_sentences(sweep: Sweep) -> list[str]:
    best = best_by_quality(sweep)
    if best is None or best.final_heldout is None:
        return []
    error = "" if best.heldout_stderr is None else f" (standard error {number(best.heldout_stderr, 2)})"
    value = quality_text(sweep, best.final_heldout)
    said = [f"By {sweep.quality}, size {best.batch_size} is best: {value}{error}."]
    if best.heldout_stderr is None:
        said.append("No spread was measured, so small differences may be chance.")
    elif close := within_noise(sweep, best):
        verb = "is" if len(close) == 1 else "are"
        said.append(
            f"{capital(sizes(size.batch_size for size in close))} {verb} within the noise of the held-out "
            "set: the difference may be chance."
        )
    if len(sweep.finished) > 1:
        said.append("Each size ran once, with one seed; what another seed would change was not measured.")
    return [" ".join(said)]


def _speed_sentences(sweep: Sweep) -> list[str]:
    quick = fastest(sweep)
    if quick is None or quick.seconds is None:
        return []
    text = f"By speed, size {quick.batch_size} is best: the same work in {duration(quick.seconds)}"
    slow = max((size.seconds, size.batch_size) for size in sweep.finished if size.seconds is not None)
    if slow[1] != quick.batch_size:
        text += f", {slow[0] / quick.seconds:.1f} times as fast as size {slow[1]}, the slowest"
    alike = [
        size.batch_size
        for size in sweep.finished
        if size is not quick and size.seconds and size.seconds <= ALIKE * quick.seconds
    ]
    if alike:
        text += f" ({sizes(alike)} took at most a tenth longer, which one run cannot tell)"
    rated = [(size.rate, size.batch_size) for size in sweep.finished if size.rate is not None]
    if not rated:
        return [f"{text}."]
    rate, most = max(rated)
    per_second = f"{number(rate, 3)} {sweep.unit} a second"
    if most == quick.batch_size:
        return [f"{text}. Once it runs it does {per_second}."]
    return [f"{text}. Once it runs size {most} is faster, with {per_second}; its start costs what it gains."]


def _trade_off_sentences(sweep: Sweep) -> list[str]:
    best, choice = best_by_quality(sweep), trade_off(sweep)
    if best is None or choice is None or choice.seconds is None:
        return []
    rule = f"the fastest size whose {sweep.quality} is within noise of the best or at most 1 % from it"
    if choice is best:
        return [f"The trade-off, {rule}, is size {best.batch_size} itself."]
    text = f"The trade-off, {rule}, is size {choice.batch_size}: "
    if best.seconds:
        text += f"{share(1 - choice.seconds / best.seconds)} less time than size {best.batch_size}, "
    lost = behind(sweep, choice, best)
    return [
        f"{text}{number(lost, 2)} {sweep.quality_unit}".strip() + (" worse." if lost else " and as good.")
    ]


# ------------------------------------------------------------------------------------------ what to mind


def confound(sweep: Sweep) -> str:
    """What the learning rate has to do with differences of quality between sizes."""
    how, base = sweep.settings.get("scale_lr"), sweep.settings.get("learning_rate")
    if how == "tuned":
        edge = [size.batch_size for size in sweep.sizes if _at_the_edge(size)]
        text = (
            "The learning rate was tuned at each size, so that differences of quality are those of the size."
        )
        if edge:
            text += f" At {sizes(edge)} the best rate was the lowest or highest tried: search further."
        return text
    mind = "what looks like the effect of batch size may be that of its learning rate"
    if how in ("linear", "sqrt"):
        rule = (
            "in proportion to the batch size" if how == "linear" else "with the square root of the batch size"
        )
        return f"The learning rate grew {rule} and was not tuned at each size: {mind}."
    if how == "none":
        rate = f" ({number(base)})" if isinstance(base, int | float) else ""
        return (
            f"The learning rate was the same at every size{rate} and was not tuned again: {mind}. "
            "Larger batches usually want a higher one."
        )
    return f"How the learning rate went with the batch size is not known: {mind}."


def _at_the_edge(size: Size) -> bool:
    rates = [rate for rate, _ in size.tuned]
    return len(rates) > 1 and size.learning_rate in (min(rates), max(rates))


def failure_sentences(sweep: Sweep) -> list[str]:
    """One for each size that did not finish, with its predicted budget where that is known."""
    said = []
    for size in sweep.sizes:
        if size in sweep.finished:
            continue
        why = f" ({size.message.rstrip('.')})" if size.message else ""
        text = f"Size {size.batch_size}: {size.status}{why}."
        usable = sweep.usable_bytes
        if size.predicted_bytes and size.status == "out of memory":
            text += f" It was predicted to need {readable(size.predicted_bytes)}"
            text += f" of {readable(usable)} usable" if usable else ""
            if size.parts:
                part, most = max(size.parts.items(), key=lambda item: item[1])
                text += (
                    f", most of it for {part} ({readable(most)}, {share(most / sum(size.parts.values()))})"
                )
            text += "."
        said.append(text)
    return said


def memory_sentences(sweep: Sweep) -> list[str]:
    """How far predictions were from measured peaks."""
    both = [size for size in sweep.finished if size.predicted_bytes and size.peak_bytes]
    if not both:
        return ["Predicted and measured memory cannot be compared: no size has both."]
    errors = {size.batch_size: (size.predicted_bytes or 0) / (size.peak_bytes or 1) - 1 for size in both}
    worst = max(errors, key=lambda batch_size: abs(errors[batch_size]))
    side = "high" if errors[worst] > 0 else "low"
    return [
        f"Predicted peaks are within {share(abs(errors[worst]))} of those measured, the furthest at size "
        f"{worst} (too {side})."
    ]


def gap(size: Size, sweep: Sweep) -> float | None:
    """How much worse held-out quality ended than training's; below 0 where it is better.

    None of GRPO, whose training reward is of sampled answers and whose held-out one is of greedy ones.
    """
    if size.final_train is None or size.final_heldout is None or sweep.settings.get("objective") == "grpo":
        return None
    return sweep.sign * (size.final_train - size.final_heldout)
