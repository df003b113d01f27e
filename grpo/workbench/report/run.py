"""The page of a training run: what it learned, what it cost, and what it wrote."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from grpo.evaluate.quality import in_words
from grpo.workbench.report.figures import Curve, colored, draw
from grpo.workbench.report.gallery import cards, example_card
from grpo.workbench.report.games import games_section
from grpo.workbench.report.read import Record, Run, figure, points
from grpo.workbench.report.sections import Figure, Page, Section, Table
from grpo.workbench.report.steps import (
    INTERVAL_ENDS,
    memory_section,
    metric_names,
    policy_section,
    reward_names,
    reward_section,
    slug,
    time_section,
)
from grpo.workbench.report.wording import cell, fixed, number, plural, share, value_text

EVAL, EVAL_REWARD = "eval_", "eval_reward"
_TOLD = {
    "model": "{}", "batch_size": "{} completions a step", "group_size": "groups of {}",
    "learning_rate": "learning rate {}", "kl_coef": "KL coefficient {}",
}  # fmt: skip
_EXPECTED = {
    "reward": "rewards", "kl": "KL", "step_time": "times", "completions/mean_length": "lengths",
    "learning_rate": "learning rate",
}  # fmt: skip


def run_page(run: Run) -> Page:
    """All sections of one run."""
    sections = [
        Section("What it says", summary(run)),
        before_after_section(run),
        games_section(run.matches),
        heldout_section(run),
        reward_section(run),
        policy_section(run),
        gallery_section(run),
        time_section(run),
        memory_section(run),
        Section("Settings", tables=_settings_tables(run), folded=True),
        Section("What is missing", [*run.missing, *_lacking(run)]),
    ]
    return Page(f"Training run: {run.name}", lede(run), [each for each in sections if not each.empty])


def lede(run: Run) -> str:
    """One sentence: how many steps, of what."""
    settings = {name: run.settings.get(name) for name in _TOLD}
    told = [_TOLD[name].format(value_text(value)) for name, value in settings.items() if value is not None]
    wanted, steps = figure(run.settings, "steps"), len(run.steps)
    done = plural(steps, "step") + (f" of {wanted:,.0f}" if wanted and wanted > steps else "")
    return f"{done}{': ' if told else ''}{', '.join(told)}."


# -------------------------------------------------------------------------------------------- in words


def summary(run: Run) -> list[str]:
    """What changed, in sentences that hold for any run."""
    said = [*_reward_sentences(run), *_heldout_sentences(run)]
    steps, kl = points(run.steps, "step", "kl")
    if kl:
        highest, at = max(zip(kl, steps, strict=True))
        said.append(
            f"KL to the reference ended at {number(kl[-1], 2)} nats a token; it was highest at step "
            f"{at:.0f}, {number(highest, 2)}."
        )
    if dull := mean(points(run.steps, "step", "frac_reward_zero_std")[1] or [0.0]):
        text = f"In {share(dull)} of the groups all rewards were equal"
        learned = run.settings.get("kl_coef")  # from the KL, also where no reward differs
        said.append(f"{text}." if learned else f"{text}: nothing to learn.")
    if skipped := round(sum(points(run.steps, "step", "skipped")[1])):
        said.append(f"{plural(skipped, 'update')} had no finite gradient and did not happen.")
    if "leak" in run.leak:
        said.append(f"Its leak test found {'that memory grew' if run.leak['leak'] else 'no leak'}.")
    return said or ["Nothing that was logged says anything of rewards."]


def ends(values: Sequence[float]) -> tuple[float, float, int]:
    """Means over the first and the last tenth, and how many values that is (at least one)."""
    count = max(1, len(values) // 10)
    return mean(values[:count]), mean(values[-count:]), count


def _reward_sentences(run: Run) -> list[str]:
    _, rewards = points(run.steps, "step", "reward")
    if len(rewards) < 2:
        return []
    first, last, count = ends(rewards)
    over = "step" if count == 1 else f"{count} steps"
    text = f"The training reward went from {fixed(first)} (first {over}) to {fixed(last)} (last {over})"
    return [f"{text}; single steps differ by chance, by their prompts for one." if count == 1 else f"{text}."]


def _heldout_sentences(run: Run) -> list[str]:
    rated = [record for record in run.evaluations if figure(record, EVAL_REWARD) is not None]
    if not rated:
        return []
    first, last = (figure(record, EVAL_REWARD) or 0.0 for record in (rated[0], rated[-1]))
    if len(rated) == 1:
        return [f"The held-out reward was evaluated once, at step {rated[0].get('step')}: {fixed(first)}."]
    if first == last:
        return [f"The held-out reward is {fixed(last)} at step {rated[-1].get('step')}, as at first."]
    text = f"The held-out reward went from {fixed(first)} to {fixed(last)} at step {rated[-1].get('step')}"
    low, high = interval(rated[-1], EVAL_REWARD)
    if low is None or high is None:
        return [f"{text}. No interval was logged, so that it may be chance."]
    verdict = "does not hold the first value" if not low <= first <= high else (
        "holds the first value: so few prompts show no change"
    )  # fmt: skip
    return [f"{text}. Its 95 % interval over prompts, {fixed(low)} to {fixed(high)}, {verdict}."]


def _lacking(run: Run) -> list[str]:
    """Figures that other runs have and this one has not."""
    missing = [text for name, text in _EXPECTED.items() if not points(run.steps, "step", name)[1]]
    missing += [] if run.evaluations else ["evaluations"]
    return [f"The run logged no {' and no '.join(missing)}."] if missing else []


# -------------------------------------------------------------------------------------------- held out


def heldout_section(run: Run) -> Section:
    """Evaluations: the first and the last in a table, all of them as curves."""
    names = metric_names(run.evaluations, EVAL)
    if not names:
        return Section("Held-out quality")
    shown = [run.evaluations[0], *run.evaluations[1:][-1:]]
    rows = [(name.removeprefix(EVAL), *(with_interval(record, name) for record in shown)) for name in names]
    known = any(name.endswith(INTERVAL_ENDS) for record in run.evaluations for name in record)
    sentence = "Greedy answers to the same held-out prompts each time; " + (
        "intervals are 95 % over prompts." if known else "this run logged no intervals."
    )
    table = Table(("column", *(f"step {record.get('step')}" for record in shown)), rows)
    return Section("Held-out quality", [sentence], [table], _heldout_figures(run, names))


def interval(record: Record, name: str) -> tuple[float | None, float | None]:
    """The ends of a metric's 95 % interval, as far as they were logged."""
    low, high = (figure(record, f"{name}{end}") for end in INTERVAL_ENDS)
    return low, high


def with_interval(record: Record, name: str) -> str:
    """0.788 (0.741 to 0.835), or without what is in brackets."""
    low, high = interval(record, name)
    text = cell(figure(record, name), fixed)
    return text if low is None or high is None else f"{text} ({fixed(low)} to {fixed(high)})"


def heldout_curve(run: Run, name: str, label: str = "") -> Curve:
    """A metric over evaluations, with its interval where every one of them has it."""
    rated = [record for record in run.evaluations if figure(record, name) is not None]
    both = [interval(record, name) for record in rated]
    low, high = (
        ([end for end in each if end is not None] for each in zip(*both, strict=True)) if both else ([], [])
    )
    if len(low) < len(rated) or len(high) < len(rated):
        low, high = [], []
    return Curve(label, *points(rated, "step", name), low, high, look="both")


def _heldout_figures(run: Run, names: Sequence[str]) -> list[Figure]:
    colors = colored(reward_names(run))
    figures = draw("heldout-reward", "Held-out reward", [heldout_curve(run, EVAL_REWARD)], x="step", y="mean")
    parts = [name.removeprefix(EVAL) for name in names if "/" in name]
    for task in dict.fromkeys(part.partition("/")[0] for part in parts):
        curves = []
        for part in (part for part in parts if part.partition("/")[0] == task):
            label = part.partition("/")[2].removesuffix("/mean").replace("_", " ")
            color = colors.get(label) if task == "rewards" else None
            curves.append(replace(heldout_curve(run, f"{EVAL}{part}", label), color=color))
        title = "Held-out rewards" if task == "rewards" else f"Held-out columns of {task}"
        figures += draw(f"heldout-{slug(task)}", title, curves, x="step", y="mean")
    return figures


def before_after_section(run: Run) -> Section:
    """What was measured before training and after it, and some answers, as `make demo` does."""
    if not run.changes:
        return Section("Before and after")
    tables = [
        Table((mode, "before", "after", "change", "95 %"), [
            (each.name, f"{each.before:.1f}", f"{each.after:.1f}", f"{each.change:+.1f}",
             f"{each.low:+.1f} to {each.high:+.1f}")
            for each in run.changes if each.mode == mode
        ], "Percent; the reward in hundredths.")
        for mode in dict.fromkeys(each.mode for each in run.changes)
    ]  # fmt: skip
    cards = [
        example_card(example.prompt, text, f"example-{number}-{when}", f"position {number}, {when}")
        for number, example in enumerate(run.examples, start=1)
        for when, text in (("before", example.before), ("after", example.after))
    ]
    return Section("Before and after", in_words(run.changes), tables, cards=cards, row=2)


# ---------------------------------------------------------------------------------------------- others


def gallery_section(run: Run) -> Section:
    """Completions, with boards where they are about chess."""
    shown = cards(run)
    if not shown:
        return Section("What it wrote")
    sentence = "Completions of the last logged steps: of each task the best, then the worst, by reward."
    if any(card.boards for card in shown):
        sentence += (
            " An arrow is a move, red where it is illegal; beside the position of an environment prompt "
            "stands the predicted one, with red squares where it is wrong."
        )
    return Section("What it wrote", [sentence], cards=shown)


def _settings_tables(run: Run) -> list[Table]:
    rows = [(f"--{name.replace('_', '-')}", value_text(value)) for name, value in run.settings.items()]
    return [Table(("setting", "value"), rows)] if rows else []
