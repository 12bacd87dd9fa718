"""Every preset, and VAPO with one part left out or changed, on the tiny task: equally many samples, several seeds.

    python tools/bench/algorithms.py [--only vapo,grpo] [--seeds 1,2,3] [--out DIR] [--table] [KEY=VALUE ...]

One Ray cluster and one SGLang server serve all runs, one after the other. Each finished run is a file under --out, and
a run whose file is there is not done again; --table does none and takes those that are there. Writes table.md and
algorithms.svg to --out: held-out reward (greedy) against the responses generated, those of value pretraining and those
that dynamic sampling dropped included.
"""

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.config.load import load_config
from megarl.report.metrics import load_metrics
from megarl.report.report import build_report
from megarl.run.inputs import load_inputs
from megarl.run.job import RunResources, open_components, open_resources
from megarl.run.signals import stopping_on_signals
from megarl.run.terminal import show_warnings
from megarl.trainer import Trainer
from megarl.value_pretraining.loop import pretrain_critic

PRESETS = (
    "vapo",
    "vc_ppo",
    "ppo",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rloo",
    "grpo",
    "lite_ppo",
    "topr",
    "dapo",
    "gspo",
    "cispo",
    "dr_grpo",
    "sao",
    "bpco",
)
ADAPTED = {
    # Of 32 iterations, where the papers have hundreds, the critic alone learns in two. Nothing bounds a step up to six
    # times the rollout's probability; a bounded critic whose values are near their bound learns slowly.
    "sao": ("policy.frozen_iterations=2", "policy.optimizer.lr=1e-3"),
    "bpco": ("policy.frozen_iterations=2", "critic.optimizer.lr=5e-3", "critic.updates_per_policy_update=4"),
}
"""What presets have on the tiny task besides."""
VARIANTS: dict[str, tuple[str, ...]] = {
    **{name: (f"algo={name}", *ADAPTED.get(name, ())) for name in PRESETS},
    **{f"{name}, staleness 2": (f"algo={name}", *ADAPTED[name], "rollout.max_staleness=2") for name in ("sao", "bpco")},
    "topr, half replayed": ("algo=topr", "algo.replay.num_iterations=2"),
    "vapo without value pretraining": ("algo=vapo", "algo.value_pretrain.steps=0"),
    "vapo without decoupled GAE": ("algo=vapo", "algo.lambda_critic=0.95"),
    "vapo without length-adaptive GAE": ("algo=vapo", "algo.lambda_policy=0.95"),
    "vapo without clip-higher": ("algo=vapo", "algo.clip_high=0.2"),
    "vapo without token-level loss": ("algo=vapo", "algo.loss_agg_mode=seq-mean-token-mean"),
    "vapo without positive LM loss": ("algo=vapo", "algo.positive_lm_coef=0"),
    "vapo without group sampling": ("algo=vapo", "train.responses_per_prompt=1"),
    "vapo with positive LM loss at 0.01": ("algo=vapo", "algo.positive_lm_coef=0.01"),
    "vapo with positive LM loss over all tokens": ("algo=vapo", "algo.positive_lm_mean_over=all_tokens"),
    "vapo with whitened advantages": ("algo=vapo", "algo.whiten_advantages=true"),
}
NUM_ITERATIONS = 32
SAMPLES_PER_ITERATION = 256
COMMON = (
    "model=tiny",
    f"train.num_iterations={NUM_ITERATIONS}",
    f"train.max_samples={NUM_ITERATIONS * SAMPLES_PER_ITERATION}",
    f"policy.optimizer.decay_iterations={NUM_ITERATIONS}",
    "train.eval_every=4",
    "logger.terminal=false",
    "logger.tensorboard=false",
)
GOAL_RISE = 0.3


@dataclass(frozen=True)
class Curve:
    """One finished run."""

    variant: str
    seed: int
    seconds: float
    samples: tuple[int, ...]
    heldout: tuple[float, ...]

    @property
    def rise(self) -> float:
        return self.heldout[-1] - self.heldout[0]


def build_overrides(variant: str, seed: int) -> list[str]:
    return [*COMMON, *VARIANTS[variant], f"seed={seed}"]


def train_once(variant: str, seed: int, overrides: Sequence[str], hosts: RunResources, run_dir: Path) -> Curve:
    """One run on the kept server. Its metrics are left in `run_dir`."""
    started = time.monotonic()
    config = load_config([*build_overrides(variant, seed), *overrides])
    inputs = load_inputs(config)
    (run_dir / "metrics.jsonl").unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        report = stack.enter_context(contextlib.closing(build_report(config.logger, run_dir, NUM_ITERATIONS)))
        stack.enter_context(show_warnings(report.message))
        trainer = Trainer(config, stack.enter_context(open_components(config, inputs, hosts, run_dir, report)))
        pretrain_critic(trainer)
        trainer.run()
    lines = [line for line in load_metrics(run_dir / "metrics.jsonl") if "reward/heldout" in line]
    return Curve(
        variant,
        seed,
        time.monotonic() - started,
        tuple(int(line.get("sampling/total_samples", 0)) for line in lines),
        tuple(line["reward/heldout"] for line in lines),
    )


def save_curve(path: Path, curve: Curve) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(vars(curve)))
    os.replace(partial, path)


def load_curve(path: Path) -> Curve:
    fields = json.loads(path.read_text())
    return Curve(**{**fields, "samples": tuple(fields["samples"]), "heldout": tuple(fields["heldout"])})


def format_table(curves: Mapping[str, Sequence[Curve]]) -> str:
    """Markdown: start, middle and end of the held-out reward, mean of the seeds and their range."""
    lines = [
        "| | seeds | start | half way | end | lowest and highest end | least rise | seconds a run |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for variant, runs in curves.items():
        ends = [run.heldout[-1] for run in runs]
        middles = [run.heldout[len(run.heldout) // 2] for run in runs]
        lines.append(
            f"| {variant} | {len(runs)} | {statistics.mean(run.heldout[0] for run in runs):.2f}"
            f" | {statistics.mean(middles):.2f} | {statistics.mean(ends):.2f} | {min(ends):.2f} to {max(ends):.2f}"
            f" | {min(run.rise for run in runs):.2f} | {statistics.mean(run.seconds for run in runs):.0f} |"
        )
    return "\n".join(lines) + "\n"


def draw(curves: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Two panels: presets, and VAPO with one part changed. A line is the mean of the seeds, its band their range."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 5), sharey=True)
    panels = (
        [name for name in curves if not name.startswith("vapo with")],
        [name for name in curves if name.startswith("vapo")],
    )
    for axis, names, title in zip(axes, panels, ("presets", "VAPO with one part changed"), strict=True):
        for i, name in enumerate(names):
            runs = curves[name]
            length = min(len(run.heldout) for run in runs)
            columns = [[run.heldout[k] for run in runs] for k in range(length)]
            samples = [statistics.mean(run.samples[k] for run in runs) for k in range(length)]
            color = pyplot.get_cmap("tab20")(i % 20)
            axis.plot(samples, [statistics.mean(column) for column in columns], label=name, color=color)
            axis.fill_between(samples, [min(c) for c in columns], [max(c) for c in columns], alpha=0.12, color=color)
        axis.set(title=title, xlabel="responses generated", ylim=(0, 1))
        axis.legend(fontsize=7)
    axes[0].set_ylabel("held-out reward, greedy")
    figure.tight_layout()
    figure.savefig(path)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="variants, by commas; a name that is no variant is a prefix of some")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(""))
    parser.add_argument("--table", action="store_true", help="train nothing: table and plot of the finished runs")
    parser.add_argument("overrides", nargs="*", help="other keys of every run")
    return parser.parse_args()


def choose(only: str | None) -> list[str]:
    """Raises SystemExit that lists the variants for a name that fits none."""
    if only is None:
        return list(VARIANTS)
    chosen: list[str] = []
    for text in only.split(","):
        fitting = [text] if text in VARIANTS else [name for name in VARIANTS if name.startswith(text)]
        if not fitting:
            raise SystemExit(f"--only: {text!r} is none of {', '.join(VARIANTS)}")
        chosen += fitting
    return chosen


def main() -> None:
    args = parse_arguments()
    wanted = [(variant, int(seed)) for seed in args.seeds.split(",") for variant in choose(args.only)]
    paths = {key: args.out / "finished" / f"{key[0].replace(' ', '_')}_{key[1]}.json" for key in wanted}
    missing = [key for key, path in paths.items() if not path.exists()]
    if missing and not args.table:
        # The preset with all three roles: Ray gets room for each.
        first = load_config([*COMMON, "algo=vapo", "algo.kl.in_loss=true", *args.overrides])
        with stopping_on_signals(), open_resources(first, load_inputs(first), args.out / "logs") as hosts:
            for variant, seed in missing:
                name = paths[variant, seed].stem
                curve = train_once(variant, seed, args.overrides, hosts, args.out / name)
                save_curve(paths[variant, seed], curve)
                text = " ".join(f"{value:.2f}" for value in curve.heldout)
                print(f"{variant}, seed {seed}: {text}  ({curve.seconds:.0f} s)", flush=True)
    curves: dict[str, list[Curve]] = {}
    for (variant, _), path in paths.items():
        if path.exists():
            curves.setdefault(variant, []).append(load_curve(path))
    if not curves:
        raise SystemExit(f"--table: no finished run in {args.out / 'finished'}")
    table = format_table(curves)
    (args.out / "table.md").write_text(table)
    draw(curves, args.out / "algorithms.svg")
    print(table)
    # An ablation shows what is lost without a part; it need not learn.
    judged = {name: curves[name] for name in PRESETS if name in curves} or curves
    least = min(run.rise for runs in judged.values() for run in runs)
    print(f"ratio: {least / GOAL_RISE:.2f} goal: 1")


if __name__ == "__main__":
    main()
