"""Experiments: small tasks with arms, seeds and predictions of the numbers that decide, and their verdicts.

    python tools/bench/experiments.py [NAME[:ARM] ...] [--seeds 1,2] [--table]
    python tools/bench/experiments.py NAME:ARM --seeds 9 --out DIR KEY=VALUE ...

The table is tools/bench/experiments/table.yaml. Without names all experiments are done, in the order of the table.
Runs on the same model share one Ray cluster and its SGLang servers. Each finished run is a line of finished.jsonl in
--out and is not done again, so that the command goes on where it was stopped. Verdicts are computed from the finished
runs and written into docs/results.md, docs/results/claims.csv and claims-seeds.csv; --table does only this. With other
keys (KEY=VALUE) of its runs it needs an --out of its own, and leaves the docs alone.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from experiment_page import (
    Arm,
    Experiment,
    Prediction,
    Run,
    Runs,
    Verdict,
    choose_seeds,
    draw_suite,
    fill_page,
    format_csv,
    format_table,
    judge_all,
    judge_experiment,
    list_parts,
    list_predictions,
    list_presets,
    list_seeds,
    list_suite,
    list_verdicts,
)
from experiment_tasks import LETTERS, TASKS, Task, centre_scores, write_biased_checkpoint, write_pairs, write_prompts

from megarl.config.load import load_config
from megarl.config.placement import list_groups
from megarl.config.schema.root import Config
from megarl.models.checkpoint import build_once, default_cache_dir, resolve_checkpoint
from megarl.report.record import load_metrics
from megarl.report.report import build_report
from megarl.run.components import TrainerComponents
from megarl.run.inputs import load_inputs
from megarl.run.job import Resources, open_components, open_resources
from megarl.signals import show_warnings, stopping_on_signals
from megarl.trainer import Trainer
from megarl.types import Experience, Metrics, Rollout, Sample, TrainingSamples

ROOT = Path(__file__).resolve().parents[2]
OUT = Path(__file__).with_suffix("")
DOCS = ROOT / "docs"
QUIET = ("logger.terminal=false", "logger.tensorboard=false")
MODEL = ("model=tiny", f"model.random.alphabet={LETTERS}", "model.random.max_length=320")
ON_TASK = (
    "model=tiny",
    "model.name=biased",
    "model.source=path",
    "reward=function",
    "data=jsonl",
    "data.prompt_length=8",
    "policy.optimizer.decay=constant",
    "policy.optimizer.decay_iterations=null",
    "policy.optimizer.min_lr=0",
    "rollout.kv_cache_tokens=65536",
    "train.eval_every=1000",
    # Some arms replace old_logprobs before the update.
    "train.reuse_logprobs=false",
)
"""Keys of every arm that has one of the tasks of experiment_tasks.py"""
REWARD_MODEL = "critic.init=REWARD_MODEL"
"""Key of an arm whose critic starts from a reward model of its task, which is trained once"""
OF_REWARD_MODEL = (
    *("data.prompt_length=8", "data.num_heldout=8", "train.samples_per_iteration=512", "train.num_iterations=12"),
    *("critic.optimizer.lr=2e-3", "critic.optimizer.min_lr=2e-4", "train.eval_every=4", "logger.tensorboard=false"),
)
TEACHER = "reference.init=TEACHER"
"""Key of an arm that learns from a teacher of the tiny task, a larger model which is trained once"""
OF_TEACHER = (
    *("algo=dapo", "model=tiny", "model.random.num_layers=3", "seed=7", "train.num_iterations=60"),
    *("policy.optimizer.decay_iterations=60", "logger.tensorboard=false"),
)
NUM_PLACES = 8
"""Parts of a response of which means are kept"""
Wanted = tuple[Experiment, str, int]
"""An experiment, one of its arms, a seed"""


def load_experiments(path: Path = OUT / "table.yaml") -> dict[str, Experiment]:
    """Experiments by name. Raises ValueError naming the one with a key or a name that there is not."""
    return {name: _read_experiment(name, node) for name, node in yaml.safe_load(path.read_text()).items()}


def load_suite() -> dict[str, Experiment]:
    """The suite's tasks; each name begins with "suite/"."""
    found = load_experiments(OUT / "suite.yaml")
    return {f"suite/{name}": replace(each, name=f"suite/{name}") for name, each in found.items()}


def _read_experiment(name: str, node: dict[str, Any]) -> Experiment:
    notes = {"shared", "cross_check", "trials", "findings"}
    known = {field.name for field in fields(Experiment)} - {"name"} | {"keys", "task_name"} | notes
    if unknown := set(node) - known:
        raise ValueError(f"{name}: found {', '.join(sorted(unknown))}; the keys are {', '.join(sorted(known))}")
    node = dict(node)
    shared, task = _flatten(node.pop("keys")), node.pop("task_name", None)
    node = {key: value for key, value in node.items() if key not in notes}
    arms = {
        arm: Arm((*shared, *_flatten(own.pop("keys", ()))), own.pop("task_name", task), **own)
        for arm, own in ((arm, dict(each)) for arm, each in node["arms"].items())
    }
    predictions = tuple(Prediction(**{**each, "seeds": tuple(each.get("seeds", ()))}) for each in node["predictions"])
    for each in predictions:
        for arm in each.arms:
            if arm not in arms:
                raise ValueError(f"{name}: a prediction about {arm}; the arms are {', '.join(arms)}")
    return Experiment(name, **{**node, "seeds": tuple(node["seeds"]), "arms": arms, "predictions": predictions})


def _flatten(keys: Any) -> list[str]:
    """Lists may hold lists, which YAML's anchors name."""
    return [keys] if isinstance(keys, str) else [key for each in keys for key in _flatten(each)]


def load_runs(path: Path) -> dict[str, dict[tuple[str, int], Run]]:
    """The finished runs by experiment, arm and seed."""
    runs: dict[str, dict[tuple[str, int], Run]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        found = {name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(line).items()}
        run = Run(**found | {"heldout": tuple(map(tuple, found.get("heldout", ())))})
        runs.setdefault(run.experiment, {})[run.arm, run.seed] = run
    return runs


def save_run(path: Path, run: Run) -> None:
    with path.open("a") as file:
        file.write(json.dumps({name: value for name, value in asdict(run).items() if value != ()}) + "\n")


def build_overrides(arm: Arm, seed: int, out: Path) -> list[str]:
    """The whole configuration of a run; writes the prompts and the checkpoint of its task where they are missing."""
    if arm.task is None:
        keys = list(arm.keys)
        if TEACHER in keys:
            keys[keys.index(TEACHER)] = f"reference.init={build_once(out / 'teachers' / 'letters', train_teacher)}"
        return [*keys, f"seed={seed}", *QUIET]
    task = TASKS[arm.task]
    train, heldout = write_prompts(out / "prompts")
    source = resolve_checkpoint(load_config(MODEL).model, default_cache_dir())
    checkpoint = build_once(
        out / "checkpoints" / arm.task, lambda directory: write_biased_checkpoint(source, directory, task.biases)
    )
    own = [f"model.path={checkpoint}", f"data.path={train}", f"data.heldout_path={heldout}"]
    own += [f"reward.path=experiment_tasks:{task.score.__name__}", f"rollout.response_length={task.response_length}"]
    keys = list(arm.keys)
    if REWARD_MODEL in keys:
        start = build_once(
            out / "reward_models" / arm.task, lambda folder: train_reward_model(checkpoint, folder, task)
        )
        keys[keys.index(REWARD_MODEL)] = f"critic.init={start}"
    return [*ON_TASK, *own, *keys, f"seed={seed}", *QUIET]


def train_reward_model(checkpoint: Path, folder: Path, task: Task) -> None:
    """Into an empty folder the reward model of pairs of the untrained policy's whole responses; its log beside it."""
    train, _ = write_prompts(run := folder.with_name(f"{task.score.__name__}-run"))
    write_pairs(checkpoint, train, run / "pairs.jsonl", task)
    given = ["model=tiny", "model.name=biased", "model.source=path", f"model.path={checkpoint}", *OF_REWARD_MODEL]
    given += [f"data.path={run / 'pairs.jsonl'}", f"rollout.response_length={task.response_length}"]
    shutil.copytree(_train(run, "experiment=reward_model", *given) / "critic", folder, dirs_exist_ok=True)
    centre_scores(folder, run / "pairs.jsonl")


def train_teacher(folder: Path) -> None:
    """Into an empty folder; its log beside it."""
    (run := folder.with_name("letters-run")).mkdir(parents=True, exist_ok=True)
    shutil.copytree(_train(run, *OF_TEACHER) / "policy", folder, dirs_exist_ok=True)


def _train(folder: Path, *keys: str) -> Path:
    """The directory of a run in a process of its own, whose log is beside it."""
    command = [sys.executable, "-m", "megarl.train", *keys, f"hydra.run.dir={folder}/run"]
    with (folder / "log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True)
    return folder / "run"


class RecordingTrainer(Trainer):
    """Keeps what `Run` wants; with a frozen arm every iteration learns from the first one's responses."""

    def __init__(self, config: Config, components: TrainerComponents, arm: Arm):
        super().__init__(config, components)
        self._parts = self.source.take, self.roles.score, self.algorithm.build_targets
        self.source.take, self.roles.score = self._take, self._score  # type: ignore[method-assign]
        self.algorithm.build_targets = self._build_targets  # type: ignore[method-assign]
        self.arm, self.task = arm, TASKS.get(arm.task or "")
        self.taken: Rollout | None = None
        self.frozen: Rollout | None = None
        self.first_old_logprobs: Tensor | None = None
        self.series: dict[str, list[Any]] = {
            name: [] for name in ("samples", "right", "reward", "surprise", "snr", "noise_share", "length", "tilt")
        }
        self.series |= {name: [] for name in ("advantages", "values", "values_before")}

    def _take(self, iteration: int) -> tuple[Rollout, Metrics]:
        rollout, metrics = self._parts[0](iteration)
        if iteration <= 0:
            return rollout, metrics
        found, add = rollout.samples, self.series
        counted = [s for s in found if s.score.details.get("counted", 1.0)]
        right = [s.score.details.get("right", float(s.score.correct)) for s in counted]
        add["samples"].append(self.source.num_samples)
        add["right"].append(sum(right) / max(1, len(right)))
        add["reward"].append(sum(s.score.reward for s in found) / len(found))
        surprise = -sum(float(s.response.rollout_logprobs.sum()) for s in found)
        add["surprise"].append(surprise / sum(len(s.response) for s in found))
        add["length"].append(sum(len(s.response) for s in found) / len(found))
        if self.arm.frozen:
            self.frozen = self.frozen or rollout
            rollout = self._age(self.frozen, iteration - 1)
        self.taken = rollout
        return rollout, metrics

    def _age(self, rollout: Rollout, age: int) -> Rollout:
        if age == 0:
            return rollout
        assert self.first_old_logprobs is not None
        samples = [
            replace(sample, age=age, first_old_logprobs=row[: len(sample.response)].numpy())
            for sample, row in zip(rollout.samples, self.first_old_logprobs, strict=True)
        ]
        return Rollout(tuple(samples), self.fleet.version)

    def _score(self, rollout: Rollout, iteration: int, **keys: Any) -> tuple[Experience, Metrics]:
        experience, metrics = self._parts[1](rollout, iteration, **keys)
        if experience.values is not None:
            values = average_by_place(experience.values, experience.mask, NUM_PLACES)
            self.series["values_before"] = self.series["values_before"] or values
            self.series["values"] = values if iteration <= 1 else self.series["values"]
        if iteration <= 0:
            return experience, metrics
        if self.arm.frozen:
            if self.first_old_logprobs is None:
                self.first_old_logprobs = experience.old_logprobs
            if self.arm.keeps_old_logprobs:
                experience = replace(experience, old_logprobs=self.first_old_logprobs)
        return experience, metrics

    def _build_targets(self, experience: Experience, iteration: int, **keys: Any) -> tuple[TrainingSamples, Metrics]:
        samples, metrics = self._parts[2](experience, iteration, **keys)
        if iteration <= 0:
            return samples, metrics
        self.series["noise_share"].append(measure_noise_share(experience, samples.advantages))
        first, *_, last = average_by_place(samples.advantages, experience.mask, 4)
        self.series["tilt"].append(first - last)
        if iteration == 1:
            self.series["advantages"] = average_by_place(samples.advantages, experience.mask, NUM_PLACES)
        if self.task is not None and self.task.bits is not None:
            assert self.taken is not None
            self.series["snr"].append(measure_snr(self.taken.samples, samples.advantages, self.task))
        return samples, metrics


def measure_snr(samples: Sequence[Sample], advantages: Tensor, task: Task) -> float:
    """Half the difference of the mean advantages of right and wrong tokens, over their pooled standard deviation.

    At each position by itself, then the mean over the positions that have both. advantages: float [B, T].
    """
    assert task.bits is not None
    right = torch.zeros(advantages.shape, dtype=torch.bool)
    inside = torch.zeros(advantages.shape, dtype=torch.bool)
    for row, sample in enumerate(samples):
        bits = task.bits(sample.prompt, sample.response)[: advantages.shape[1]]
        right[row, : len(bits)] = torch.tensor(bits)
        inside[row, : len(bits)] = True
    found = []
    for column in range(advantages.shape[1]):
        values, is_right = advantages[inside[:, column], column].double(), right[inside[:, column], column]
        good, bad = values[is_right], values[~is_right]
        if len(good) < 2 or len(bad) < 2:
            continue
        pooled = ((len(good) - 1) * good.var() + (len(bad) - 1) * bad.var()) / (len(values) - 2)
        if pooled > 0:
            found.append(float((good.mean() - bad.mean()) / 2 / pooled.sqrt()))
    return sum(found) / len(found) if found else 0.0


def average_by_place(numbers: Tensor, mask: Tensor, num_places: int) -> list[float]:
    """The mean over the tokens in each of so many equal parts of their responses; 0 where none is. numbers: float
    [B, T]. mask: bool [B, T], True for the first tokens of each row."""
    places = torch.arange(mask.shape[1]) * num_places // mask.sum(1, keepdim=True).clamp(min=1)
    return [
        float(numbers[mask & (places == i)].double().sum()) / max(1, int((mask & (places == i)).sum()))
        for i in range(num_places)
    ]


def measure_noise_share(experience: Experience, advantages: Tensor) -> float:
    """The share of sum |A| that is in groups with at least 7 of 8 rewards of 1, and not all."""
    per_row = (advantages.abs() * experience.mask).sum(1).double()
    solved = torch.zeros(len(per_row), dtype=torch.bool)
    for group in set(experience.groups.tolist()):
        rows = experience.groups == group
        solved[rows] = bool(7 / 8 <= experience.rewards[rows].mean() < 1)
    return float(per_row[solved].sum() / per_row.sum()) if float(per_row.sum()) else 0.0


def train_once(wanted: Wanted, config: Config, out: Path, hosts: Resources) -> Run:
    """One run on the kept servers. Its metrics are left in a folder of --out."""
    (experiment, name, seed), started = wanted, time.monotonic()
    inputs = load_inputs(config)
    run_dir = out / "runs" / f"{experiment.name.replace('/', '_')}_{name.replace(' ', '_')}_{seed}"
    (run_dir / "metrics.jsonl").unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        report = build_report(config.logger, run_dir, config.train.num_iterations)
        stack.enter_context(contextlib.closing(report))
        stack.enter_context(show_warnings(report.message))
        components = stack.enter_context(open_components(config, inputs, hosts, run_dir, report))
        trainer = RecordingTrainer(config, components, experiment.arms[name])
        trainer.run()
    lines = [line for line in load_metrics(run_dir / "metrics.jsonl") if "reward/heldout" in line]
    heldout = tuple((int(line.get("sampling/total_samples", 0)), line["reward/heldout"]) for line in lines)
    series = {key: tuple(values) for key, values in trainer.series.items()}
    return Run(experiment.name, name, seed, "real", time.monotonic() - started, **series, heldout=heldout)


def run_missing(missing: Sequence[Wanted], overrides: Sequence[str], out: Path) -> int:
    """All of them; runs on the same model share Ray and the servers, and one that fails is reported and left out. The
    number of those that failed.
    """
    num_failed = 0
    by_model: dict[tuple[str, str], list[tuple[Wanted, Config]]] = {}
    for wanted in missing:
        experiment, name, seed = wanted
        arm = experiment.arms[name]
        config = load_config([*build_overrides(arm, seed, out), *overrides])
        by_model.setdefault((experiment.name, arm.task or ""), []).append((wanted, config))
    for (name, task), each in by_model.items():
        # Ray gets room for the arm with the most processes.
        largest = max((config for _, config in each), key=lambda c: sum(g.num_processes for g in list_groups(c)))
        logs = out / "logs" / f"{name.replace('/', '_')}-{task}"
        with stopping_on_signals(), open_resources(largest, load_inputs(largest).checkpoint, logs) as hosts:
            for (experiment, arm_name, seed), config in each:
                title = f"{experiment.name} {arm_name}, seed {seed}"
                try:
                    run = train_once((experiment, arm_name, seed), config, out, hosts)
                except Exception:
                    print(f"{title}: failed:\n{traceback.format_exc()}", flush=True)
                    num_failed += 1
                    continue
                save_run(out / "finished.jsonl", run)
                shares = " ".join(f"{share:.2f}" for share in run.right[:: max(1, len(run.right) // 8)])
                print(f"{title}: {shares}  ({run.seconds:.0f} s)", flush=True)
    return num_failed


def write_docs(experiments: Mapping[str, Experiment], runs: Mapping[str, Runs], folder: Path = DOCS) -> None:
    """The tables in results.md, the data and the picture that follow from the runs."""
    page = (DOCS / "results.md").read_text()
    suite = {name: each for name, each in experiments.items() if name.startswith("suite/")}
    page = fill_page(page, "claims", format_table(list_verdicts(experiments, runs)))
    page = fill_page(page, "parts", format_table(list_parts(experiments["vapo_parts"], runs["vapo_parts"])))
    page = fill_page(page, "suite", format_table(list_suite(suite, runs)))
    page = fill_page(page, "presets", list_presets(experiments["algorithms"], runs["algorithms"]))
    files = {
        "results.md": page,
        "results/claims.csv": format_csv(list_predictions(experiments, runs)),
        "results/claims-seeds.csv": format_csv(list_seeds(experiments, runs)),
        "figures/suite.svg": draw_suite(suite, runs),
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def choose(experiments: Mapping[str, Experiment], names: Sequence[str]) -> list[tuple[Experiment, str]]:
    """The arms that names choose. Raises SystemExit that lists what there is for a name of nothing."""
    chosen = []
    for text in names or experiments:
        name, _, arm = text.partition(":")
        if name not in experiments:
            raise SystemExit(f"{name!r} is none of {', '.join(experiments)}")
        arms = experiments[name].arms
        if arm and arm not in arms:
            raise SystemExit(f"{name}: {arm!r} is none of {', '.join(arms)}")
        chosen += [(experiments[name], each) for each in ([arm] if arm else arms)]
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="NAME[:ARM] or KEY=VALUE", help="what is run, and with which keys")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], help="others than listed")
    parser.add_argument("--out", type=Path, default=OUT, help="where finished runs are found and kept")
    parser.add_argument("--table", action="store_true", help="train nothing: the tables of the finished runs")
    args = parser.parse_intermixed_args()
    overrides = [word for word in args.words if "=" in word]
    if overrides and args.out == OUT:
        raise SystemExit(f"{overrides[0]}: with other keys --out is needed, for other numbers")
    # reward=function is loaded in processes of its own.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(OUT.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    experiments, finished, num_failed = load_experiments() | load_suite(), args.out / "finished.jsonl", 0
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.table:
        done = load_runs(finished)
        chosen = choose(experiments, [word for word in args.words if "=" not in word])
        wanted = [(each, arm, seed) for each, arm in chosen for seed in args.seeds or choose_seeds(each, arm)]
        missing = [key for key in wanted if key[1:] not in done.get(key[0].name, {})]
        num_failed = run_missing(missing, overrides, args.out.resolve())
    found = load_runs(finished)
    runs: dict[str, Runs] = {name: found.get(name, {}) for name in experiments}
    if args.out == OUT:
        write_docs(experiments, runs)
    verdicts = [judge_experiment(each, judge_all(each, runs[name])) for name, each in experiments.items()]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict.value}" for verdict in Verdict)
    print(f"{len(experiments)} experiments: {counts}" + (f"; {num_failed} runs failed" if num_failed else ""))
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
