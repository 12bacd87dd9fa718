"""Table, curve and episodes of experiment=calculator, from what training and evaluation have written; runs nothing.

    TASK="model=smollm2_135m data=calculator environment=calculator reward=addition rollout.response_length=80"
    python -m megarl.evaluate $TASK hydra.run.dir=runs/before
    python -m megarl.train experiment=calculator hydra.run.dir=runs/calculator
    python -m megarl.evaluate model=checkpoint model.path=runs/calculator/policy evaluate.heldout=false \
      hydra.run.dir=runs/after
    python tools/bench/calculator.py runs/before runs/calculator runs/after [--out tools/bench/calculator]

Writes calculator.svg to --out, and into docs/results/environments.md the table (reward, calls and right answers of the
held-out greedy episodes, with 95% intervals) and a held-out problem before and after training.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.report.estimators import Estimate, compute_mean
from megarl.report.metrics import load_metrics
from megarl.report.text import fill_block

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "environments.md"
BEGIN = "<!-- begin calculator: made by tools/bench/calculator.py -->\n"
END = "<!-- end calculator -->"
IMAGE = "![reward and calls of sampled and of greedy episodes](../../tools/bench/calculator/calculator.svg)"
CONFIDENCE = 0.95
Record = Mapping[str, Any]
"""A line of responses.jsonl"""


def has_called(record: Record) -> bool:
    """Whether a tool was called and answered without an error."""
    observations = [turn["observation"] for turn in record.get("turns", ())]
    return any(text and "error: " not in text for text in observations)


SHARES: Mapping[str, Callable[[Record], bool]] = {
    "calculator called": has_called,
    "right answer": lambda record: bool(record["correct"]),
}


def load_responses(run_dir: Path) -> list[Record]:
    with (run_dir / "responses.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def estimate_share(records: Sequence[Record], share: Callable[[Record], bool]) -> Estimate:
    """The share of the records, with Wilson's interval."""
    return compute_mean([float(share(record)) for record in records], 1, CONFIDENCE)


def estimate_reward(records: Sequence[Record]) -> Estimate:
    """The mean reward, with the normal interval."""
    rewards = [record["reward"] for record in records]
    mean = statistics.fmean(rewards)
    half = statistics.NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * statistics.stdev(rewards) / math.sqrt(len(rewards))
    return Estimate(mean, mean - half, mean + half)


def compute_rise(before: Estimate, after: Estimate) -> tuple[float, float, float]:
    """The difference of two independent estimates and its interval (Newcombe 1998, method 10, from their own)."""
    rise = after.value - before.value
    low = rise - math.hypot(after.value - after.low, before.high - before.value)
    high = rise + math.hypot(after.high - after.value, before.value - before.low)
    return rise, low, high


def format_table(before: Sequence[Record], after: Sequence[Record]) -> str:
    """Markdown: a row per quantity, before and after training, and the rise."""
    lines = [f"| {len(after)} held-out episodes, greedy | before | after | rise |", "| --- | --- | --- | --- |"]
    rows = {name: [estimate_share(records, share) for records in (before, after)] for name, share in SHARES.items()}
    for name, (first, last) in ({"reward": [estimate_reward(before), estimate_reward(after)]} | rows).items():
        rise, low, high = compute_rise(first, last)
        cells = [f"{each.value:.3f} ({each.low:.3f} to {each.high:.3f})" for each in (first, last)]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {rise:+.3f} ({low:+.3f} to {high:+.3f}) |")
    return "\n".join(lines) + "\n"


def format_episode(record: Record) -> str:
    """What the policy wrote and what it was answered, as a block of text."""
    turns = record.get("turns") or [{"action": record["response"], "observation": ""}]
    parts = [f"{turn['action']}{turn['observation']}" for turn in turns]
    return f"```\n{record['prompt']}{''.join(parts)}\n```\n"


def format_episodes(before: Sequence[Record], after: Sequence[Record]) -> str:
    """Markdown: one problem that is solved after training and not before, in both."""
    later = {record["problem"]: record for record in after}
    pairs = [(first, later[first["problem"]]) for first in before]
    solved = [pair for pair in pairs if pair[1]["correct"] and not pair[0]["correct"]]
    first, last = (solved or pairs)[0]
    return (
        f"Before, reward {first['reward']:g}:\n\n{format_episode(first)}\n"
        f"After, reward {last['reward']:g}:\n\n{format_episode(last)}"
    )


def draw(lines: Sequence[Mapping[str, float]], path: Path) -> None:
    """Reward and calls per episode against the iteration: sampled in training, greedy on held-out problems."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    panels = (
        ("reward", "reward/mean", "reward/heldout"),
        ("calls per episode", "environment/tool_calls", "heldout/environment/tool_calls"),
    )
    for axis, (title, sampled, greedy) in zip(axes, panels, strict=True):
        for key, label, style in ((sampled, "sampled, training", "-"), (greedy, "greedy, held-out", "o-")):
            points = [(line["iteration"], line[key]) for line in lines if key in line]
            axis.plot([x for x, _ in points], [y for _, y in points], style, label=label)
        axis.set(title=title, xlabel="iteration", ylim=(0, None))
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="folder of the evaluation before training")
    parser.add_argument("run", type=Path, help="folder of the training")
    parser.add_argument("after", type=Path, help="folder of the evaluation after training")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(""))
    args = parser.parse_args()
    before, after = load_responses(args.before), load_responses(args.after)
    args.out.mkdir(parents=True, exist_ok=True)
    table = format_table(before, after)
    content = f"\n{IMAGE}\n\n{table}\n{format_episodes(before, after)}\n"
    PAGE.write_text(fill_block(PAGE.read_text(), BEGIN, END, content, str(PAGE)))
    draw(load_metrics(args.run / "metrics.jsonl"), args.out / "calculator.svg")
    print(table)


if __name__ == "__main__":
    main()
