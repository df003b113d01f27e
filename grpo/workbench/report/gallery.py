"""Which completions a report shows, and what it says of each.

Of the last logged steps, the best and the worst by reward, of every task alike: rewards of different
tasks do not compare. Completions of the same text to the same prompt are shown once.
"""

from collections.abc import Mapping, Sequence

from grpo.workbench.report.boards import draw_boards
from grpo.workbench.report.read import Record, Run, figure
from grpo.workbench.report.sections import Card
from grpo.workbench.report.wording import number

CARDS, CANDIDATES = 12, 96


def reward_of(record: Record, weights: Mapping[str, float]) -> float:
    """The sum of a completion's rewards, by the run's weights."""
    rewards = record.get("rewards")
    given = rewards if isinstance(rewards, dict) else {}
    return sum(weights.get(name, 1.0) * (figure(given, name) or 0.0) for name in given)


def reward_weights(run: Run) -> dict[str, float]:
    """By reward function, as named in the completions; {} where all count the same."""
    names, weights = run.settings.get("reward"), run.settings.get("reward_weights")
    if not isinstance(names, list) or not isinstance(weights, list) or len(names) != len(weights):
        return {}
    return {str(name).rpartition(":")[2]: float(weight) for name, weight in zip(names, weights, strict=True)}


def chosen(run: Run, count: int = CARDS) -> list[Record]:
    """About `count` completions: task by task, the best first, then the worst with the worst last."""
    weights = reward_weights(run)
    last = run.completions[-CANDIDATES:]
    distinct = {(str(each.get("prompt")), str(each.get("completion"))): each for each in last}
    tasks: dict[str, list[Record]] = {}
    for (prompt, _), record in distinct.items():
        tasks.setdefault(_task(prompt), []).append(record)
    picked: list[Record] = []
    for records in tasks.values():
        each = max(2, count // len(tasks))
        ranked = sorted(records, key=lambda record: -reward_of(record, weights))
        best = _of_different_prompts(ranked, each - each // 2)
        worst = _of_different_prompts(
            [record for record in reversed(ranked) if record not in best], each // 2
        )
        picked += [*best, *reversed(worst)]
    return picked


def _of_different_prompts(ranked: Sequence[Record], count: int) -> list[Record]:
    """The first `count`, of different prompts as far as there are any."""
    first: dict[object, Record] = {}
    for record in ranked:
        first.setdefault(record.get("prompt"), record)
    picked = list(first.values())[:count]
    others = (record for record in ranked if record not in picked)
    picked += [record for record, _ in zip(others, range(count - len(picked)), strict=False)]
    return picked


def _task(prompt: str) -> str:
    return {"P:": "policy", "A:": "environment"}.get(prompt[:2], "text")


def card(record: Record, name: str, weights: Mapping[str, float], *, run: str = "") -> Card:
    """name: unique within the page. run: named where a page holds several."""
    prompt, completion = _asked(record), str(record.get("completion") or "")
    drawn = draw_boards(prompt, completion, name)
    title = [run] if run else []
    title += [f"step {record.get('step', '?')}", _task(prompt), f"reward {reward_of(record, weights):.3f}"]
    if (advantage := figure(record, "advantage")) is not None:
        title.append(f"advantage {advantage:+.2f}")
    remarks = [drawn.remark] if drawn.remark else []
    if record.get("terminated") is False:
        remarks.append(f"Cut off after {number(figure(record, 'num_tokens') or 0)} tokens.")
    parts = record.get("components") or record.get("rewards")
    given = parts if isinstance(parts, dict) else {}
    scores = [(part, value) for part in given if (value := figure(given, part)) is not None]
    return Card(", ".join(title), drawn.boards, prompt, completion, scores, " ".join(remarks))


def _asked(record: Record) -> str:
    """The prompt, of a conversation what was said in it."""
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        return str(record.get("prompt") or "")
    said = [message for message in messages if isinstance(message, dict)]
    return "\n".join(f"{message.get('role')}: {message.get('content', '')}" for message in said)


def example_card(prompt: str, completion: str, name: str, title: str) -> Card:
    """Of a completion that was not scored."""
    drawn = draw_boards(prompt, completion, name)
    return Card(title, drawn.boards, prompt, completion, (), drawn.remark)


def cards(run: Run) -> list[Card]:
    weights = reward_weights(run)
    return [card(record, f"card-{index}", weights) for index, record in enumerate(chosen(run))]
