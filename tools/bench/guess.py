"""The tiny model learns to guess a number in three turns, under presets with and without a critic, several seeds.

    python tools/bench/guess.py [--only vapo,grpo] [--seeds 1,2,3] [--out tools/bench/guess] [--table] [KEY=VALUE ...]

One Ray cluster and one SGLang server serve all runs of experiment=guess, one after the other. Each finished run is a
file under --out, and a run whose file is there is not done again; --table does none and takes those that are there.
Writes guess.svg to --out: the reward of sampled and of greedy episodes against the iteration, with the best that a
policy can score which ignores the answers. Puts the table of all runs, and the greedy episodes of the first seed before
and after training, into docs/results/environments.md.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from algorithms import ADAPTED

from megarl.config.load import load_config
from megarl.config.schema.data import GuessDataConfig
from megarl.config.schema.environment import GuessEnvironmentConfig
from megarl.environment.guess import compute_best_with_answers, compute_best_without_answers
from megarl.report.estimators import compute_mean
from megarl.report.metrics import load_metrics
from megarl.report.report import build_report
from megarl.report.text import fill_block
from megarl.run.inputs import load_inputs
from megarl.run.job import RunResources, open_components, open_resources
from megarl.run.signals import stopping_on_signals
from megarl.run.terminal import show_warnings
from megarl.trainer import Trainer
from megarl.types import Sample
from megarl.value_pretraining.loop import pretrain_critic

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results" / "environments.md"
BEGIN = "<!-- begin guess: made by tools/bench/guess.py -->\n"
END = "<!-- end guess -->"
IMAGE = "![reward of sampled and of greedy episodes against the iteration](../../tools/bench/guess/guess.svg)"
PRESETS = ("vapo", "grpo", "sao", "bpco")
COMMON = ("experiment=guess", "logger.terminal=false", "logger.tensorboard=false")
NUM_EPISODES = 64
"""Sampled episodes of each number after training"""
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Run:
    """One finished run."""

    preset: str
    seed: int
    seconds: float
    sampled: tuple[float, ...]
    """Mean reward of each iteration's episodes, from iteration 1"""
    greedy: tuple[tuple[int, float], ...]
    """(iteration, mean reward of the greedy episode of each number)"""
    final: tuple[float, ...]
    """Reward of each sampled episode after training, NUM_EPISODES of each number"""
    num_ruled_out: int
    """Guesses in them that an earlier answer had ruled out"""
    num_later: int
    """Guesses in them after the first one"""
    before: tuple[str, ...]
    after: tuple[str, ...]
    """The greedy episode of each number, as text"""


def load_bounds() -> tuple[float, float]:
    """The best scores without and with the answers."""
    config = load_config(COMMON)
    assert isinstance(config.data, GuessDataConfig)
    assert isinstance(config.environment, GuessEnvironmentConfig)
    numbers, turns = config.data.max_number, config.environment.max_turns
    return compute_best_without_answers(numbers, turns), compute_best_with_answers(numbers, turns)


def format_episode(sample: Sample, tokenizer) -> str:  # type: ignore[no-untyped-def]
    """Guesses and answers one after the other: `4 > 6 < 5`."""
    response, parts = sample.response, []
    starts = [turn.start for turn in response.turns[1:]] + [len(response)]
    for turn, start in zip(response.turns, starts, strict=True):
        observation = tokenizer.decode(response.token_ids[turn.end : start].tolist())
        parts += [turn.text or "(nothing)", *([observation] if observation else [])]
    return " ".join(parts)


def train_once(preset: str, seed: int, extra: Sequence[str], hosts: RunResources, run_dir: Path) -> Run:
    """One run on the kept server. Its metrics are left in `run_dir`."""
    started = time.monotonic()
    config = load_config([*COMMON, f"algo={preset}", *ADAPTED.get(preset, ()), f"seed={seed}", *extra])
    inputs = load_inputs(config)
    (run_dir / "metrics.jsonl").unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        report = build_report(config.logger, run_dir, config.train.num_iterations)
        stack.enter_context(contextlib.closing(report))
        stack.enter_context(show_warnings(report.message))
        components = stack.enter_context(open_components(config, inputs, hosts, run_dir, report))
        trainer, collector = Trainer(config, components), components.collector
        assert collector is not None

        def play(name: str) -> tuple[str, ...]:
            found = collector.collect_greedy(inputs.data.heldout, weight_version=trainer.version, key=f"{name}-{seed}")
            return tuple(format_episode(sample, inputs.tokenizer) for sample in found.samples)

        pretrain_critic(trainer)
        trainer.publish(0)
        before = play("before")
        trainer.run()
        after = play("after")
        final = collector.collect(
            inputs.data.heldout, NUM_EPISODES, weight_version=trainer.version, key="final"
        ).samples
    lines = load_metrics(run_dir / "metrics.jsonl")
    turns = [turn for sample in final for turn in sample.response.turns]
    return Run(
        preset,
        seed,
        time.monotonic() - started,
        tuple(line["reward/mean"] for line in lines if "reward/mean" in line),
        tuple((int(line["iteration"]), line["reward/heldout"]) for line in lines if "reward/heldout" in line),
        tuple(sample.score.reward for sample in final),
        int(sum(turn.details.get("ruled_out", 0.0) for turn in turns)),
        len(turns) - len(final),
        before,
        after,
    )


def save_run(path: Path, run: Run) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(vars(run)))
    os.replace(partial, path)


def load_run(path: Path) -> Run:
    fields = json.loads(path.read_text())
    fields |= {name: tuple(fields[name]) for name in ("sampled", "final", "before", "after")}
    return Run(**fields | {"greedy": tuple((iteration, reward) for iteration, reward in fields["greedy"])})


def format_table(runs: Mapping[str, Sequence[Run]]) -> str:
    """Markdown: a row per run."""
    lines = [
        "| | seed | greedy, start | greedy, end | sampled, end | 95% interval | guesses ruled out |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for run in (run for found in runs.values() for run in found):
        interval = compute_mean(run.final, 1, CONFIDENCE)
        lines.append(
            f"| {run.preset} | {run.seed} | {run.greedy[0][1]:.2f} | {run.greedy[-1][1]:.2f} | {interval.value:.3f}"
            f" | {interval.low:.3f} to {interval.high:.3f} | {run.num_ruled_out} of {run.num_later} |"
        )
    return "\n".join(lines) + "\n"


def format_episodes(runs: Mapping[str, Sequence[Run]]) -> str:
    """Markdown: the greedy episode of each number, before and after training, of the first seed."""
    firsts = [found[0] for found in runs.values()]
    head = [f"{run.preset}, before | {run.preset}, after" for run in firsts]
    lines = [f"| number | {' | '.join(head)} |", f"| --- |{' --- |' * 2 * len(firsts)}"]
    for number in range(len(firsts[0].before)):
        cells = [f"`{text}`" for run in firsts for text in (run.before[number], run.after[number])]
        lines.append(f"| {number + 1} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def fill_page(page: str, runs: Mapping[str, Sequence[Run]]) -> str:
    """The page with the tables of these runs. Raises ValueError where its marks are missing."""
    content = f"\n{IMAGE}\n\n{format_table(runs)}\n{format_episodes(runs)}\n"
    return fill_block(page, BEGIN, END, content, str(PAGE))


def draw(runs: Mapping[str, Sequence[Run]], path: Path) -> None:
    """Sampled and greedy reward; a line is the mean of the seeds, its band their range."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5), sharey=True)
    blind, best = load_bounds()
    titles = ("sampled episodes, 256 an iteration", "greedy episodes, one of each number")
    for axis, title in zip(axes, titles, strict=True):
        for i, (preset, found) in enumerate(runs.items()):
            if axis is axes[0]:
                curves = [list(enumerate(run.sampled, start=1)) for run in found]
            else:
                curves = [list(run.greedy) for run in found]
            columns = [[reward for _, reward in column] for column in zip(*curves, strict=True)]
            iterations = [iteration for iteration, _ in curves[0]]
            axis.plot(iterations, [statistics.mean(column) for column in columns], label=preset, color=f"C{i}")
            lows, highs = [min(c) for c in columns], [max(c) for c in columns]
            axis.fill_between(iterations, lows, highs, alpha=0.15, color=f"C{i}")
        axis.axhline(blind, color="black", linestyle="--", label=f"best that ignores the answers, {blind:.3f}")
        axis.axhline(best, color="black", linestyle=":", label=f"best that reads them, {best:g}")
        axis.set(title=title, xlabel="iteration", ylim=(0, 1.05))
        axis.legend(fontsize=8, loc="lower right")
    axes[0].set_ylabel("reward: share of the numbers that are guessed")
    figure.tight_layout()
    figure.savefig(path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PRESETS), help="presets, by commas")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(""))
    parser.add_argument("--table", action="store_true", help="train nothing: tables and plot of the finished runs")
    parser.add_argument("overrides", nargs="*", help="other keys of every run")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    wanted = [(preset, int(seed)) for preset in args.only.split(",") for seed in args.seeds.split(",")]
    paths = {key: args.out / "finished" / f"{key[0]}_{key[1]}.json" for key in wanted}
    missing = [key for key, path in paths.items() if not path.exists()]
    if missing and not args.table:
        # The preset with all three roles: Ray gets room for each.
        first = load_config([*COMMON, "algo=vapo", "algo.kl.in_loss=true", *args.overrides])
        with stopping_on_signals(), open_resources(first, load_inputs(first), args.out / "logs") as hosts:
            for preset, seed in missing:
                run = train_once(preset, seed, args.overrides, hosts, args.out / f"{preset}_{seed}")
                save_run(paths[preset, seed], run)
                text = " ".join(f"{reward:.2f}" for _, reward in run.greedy)
                print(f"{preset}, seed {seed}: {text}  ({run.seconds:.0f} s)", flush=True)
    runs: dict[str, list[Run]] = {}
    for (preset, _), path in paths.items():
        if path.exists():
            runs.setdefault(preset, []).append(load_run(path))
    if not runs:
        raise SystemExit(f"--table: no finished run in {args.out / 'finished'}")
    draw(runs, args.out / "guess.svg")
    if args.out == Path(__file__).with_suffix(""):
        PAGE.write_text(fill_page(PAGE.read_text(), runs))
    print(format_table(runs))
    blind, _ = load_bounds()
    least = min(compute_mean(run.final, 1, CONFIDENCE).low for found in runs.values() for run in found)
    print(f"ratio: {least / blind:.2f} goal: 1")


if __name__ == "__main__":
    main()
