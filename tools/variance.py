"""The variance of the policy gradient under each baseline, of one policy, one critic and saved responses.

    megarl variance model=checkpoint model.path=RUN_DIR/policy critic.init=RUN_DIR/critic rollout.file=FILE.jsonl
        [key=value] ... [--json FILE.json]

FILE.jsonl has a run's responses (logger.save_rollouts=true): the policy's own, from which neither model has learned,
give its gradient. Without critic.init no critic is measured. A batch, as large as an iteration of that run or of
train.prompts_per_iteration=N, gives one gradient for each baseline: the plain sum of A_t grad log pi, averaged by
algo.loss_agg_mode. At most train.num_iterations batches are taken. All is computed in this process.

variance: tr Cov of a batch's gradient. signal: |E g|^2. Both are unbiased; their ratio does not depend on the scale of
advantages. cosine: of E g and that of the leave-one-out baseline. group size: the K whose leave-one-out baseline has
this variance on the same responses, with advantages scaled to an equal gradient, those of a biased baseline (lambda
below 1) to an equal part along the leave-one-out gradient. Brackets: 95% intervals over batches.
"""

import argparse
import json
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.algo.advantages import ADVANTAGES, update_rho
from megarl.algo.algorithm import compute_targets
from megarl.algo.objective import load_state
from megarl.config.errors import ConfigError
from megarl.config.load import load
from megarl.config.overrides import check_words, take_config_dirs
from megarl.config.schema.algo import ADAPTIVE, AlgoConfig, NormScope, RewardNormConfig
from megarl.config.schema.roles import OptimizerConfig, ParallelConfig
from megarl.config.schema.root import Config
from megarl.mcore.checkpoints import CheckpointReader
from megarl.mcore.spec import Role, WorkerSpec
from megarl.rollout.collector import build_tensors
from megarl.rollout.rollout_file import read_rollouts
from megarl.rollout.source import SavedSource, join_groups, split_groups
from megarl.run.command import end_with_closed_pipe, end_with_config_error
from megarl.run.inputs import Inputs, load_inputs
from megarl.types import Experience, TrainingSamples

OWN = (
    *("algo.advantage=gae", "algo.surrogate=clip", "algo.rl_loss_coef=1", "algo.mismatch.correction=tis"),
    *("algo.value_pretrain.enabled=false", "train.num_minibatches=1"),
)
"""What rollout.file asks for; nothing of it is in the gradient"""
KEPT = ("gamma", "length_alpha", "lambda_min", "tether", "overlong", "loss_agg_mode")
"""What the gradient has of algo"""
SUB_GROUPS, LAMBDAS = (2, 4, 8, 16), (0.5, 0.95, 1, ADAPTIVE)
LEAST_BATCHES, NUM_DRAWS, ROUNDING = 3, 2000, 1e-5
OFF_POLICY = 0.01
"""From this KL per token on the responses are those of another policy"""


class Baseline(NamedTuple):
    """size: of the sub-groups that each group is cut into, None: it is whole. scale: E g = scale * (the policy's
    gradient), NaN: not known, as of a biased one."""

    name: str
    changes: dict[str, Any]
    size: int | None = None
    scale: float = 1.0


def list_baselines(size: int, num_prompts: int, has_critic: bool) -> list[Baseline]:
    """Those of groups of `size` responses and, with a critic, of values; further ones of ADVANTAGES by their names."""
    none, centered = {"advantage": "reinforce"}, {"reward_norm": RewardNormConfig(mean=NormScope.batch)}
    found = [Baseline("none", none)]
    found.append(Baseline("mean of the batch", none | centered, scale=1 - 1 / (size * num_prompts)))
    if size > 1:
        found.append(Baseline("mean of the group (GRPO)", {"advantage": "group"}, scale=1 - 1 / size))
        sizes = [*(each for each in SUB_GROUPS if each < size and size % each == 0), size]
        found += [Baseline(f"leave-one-out of {each} (RLOO)", {"advantage": "rloo"}, each) for each in sizes]
    for each in LAMBDAS if has_critic else ():
        changes = {"advantage": "gae", "lambda_policy": each}
        found.append(Baseline(f"critic, lambda {each}", changes, scale=1.0 if each == 1 else math.nan))
    further = [name for name, it in ADVANTAGES.items() if has_critic or not it.needs_critic]
    for name in further if size > 1 else ():
        if name not in ("none", "reinforce", "group", "rloo", "gae"):
            changes = {"advantage": name, "lambda_policy": 1}
            found.append(Baseline(name, changes, scale=1.0 if name in ("tether", "control_variate") else math.nan))
    return found


class Estimate:
    """What the gradients of one baseline have in common, and how they scatter. Of the gradients the mean alone is kept.

    With m_i the mean of the first i, h_i = sqrt((i - 1) / i) (g_i - m_{i-1}) are orthonormal contrasts (Helmert's):
    uncorrelated with each other and with m_i, E |h_i|^2 = tr Cov, and their mean over i = 2..n is the unbiased tr Cov.
    rows: |h_i|^2, h_i m_i, h_i h'_i and h_i m'_i of each batch but the first, ' of the reference.
    """

    def __init__(self) -> None:
        self.mean: Any = 0.0
        self.contrast: Tensor | None = None
        self.rows: list[list[float]] = []

    def add(self, gradient: Tensor, number: int, reference: "Estimate") -> None:
        """Take in the gradient of batch `number`, from 1. reference: itself, or one that has taken its own."""
        delta = gradient.double() - self.mean
        self.mean = self.mean + delta / number
        contrast = delta.mul_(math.sqrt((number - 1) / number))
        if reference is self:
            self.contrast = contrast
        if number > 1:
            others = contrast, self.mean, reference.contrast, reference.mean
            self.rows.append([float(contrast @ other) for other in others])


def find_group_size(variance: float, measured: Mapping[int, float]) -> float:
    """The K at which the leave-one-out baseline has this variance: 0 below the smallest measured one, infinity beyond
    the largest. The variance is linear in 1 / (K - 1): for each prompt the gradient is a U-statistic of pairs. One that
    rises with K, by chance, counts as that of the smaller K.
    """
    sizes = sorted(measured)
    falling = np.minimum.accumulate([measured[size] for size in sizes])
    if not falling[-1] * (1 - ROUNDING) <= variance <= falling[0] * (1 + ROUNDING):
        return math.nan if math.isnan(variance) else 0.0 if variance > falling[0] else math.inf
    return 1 + 1 / float(np.interp(variance, falling[::-1], [1 / (size - 1) for size in reversed(sizes)]))


def summarise(baselines: Sequence[Baseline], estimates: Sequence[Estimate], reference: int) -> list[dict[str, Any]]:
    """The numbers of each baseline, intervals as (low, high). reference: the number of the one that others are compared
    with. NaN: not known. A ratio without a signal is infinite.

    Variances are drawn by bootstrap over the contrasts, of the same batches for all baselines; the rest is normal.
    """
    chance, num = np.random.default_rng(1), len(estimates[0].rows) + 1
    # The first of the draws is what was measured.
    drawn = np.vstack([np.arange(num - 1), chance.integers(num - 1, size=(NUM_DRAWS, num - 1))])
    noise = np.append(0.0, chance.standard_normal(NUM_DRAWS))
    spread, own, both, across = np.array([each.rows for each in estimates]).transpose(2, 0, 1)
    products = [[float(each.mean @ x.mean) for x in (each, estimates[reference])] for each in estimates]
    signal, common = np.array(products).T - np.stack([spread, both]).mean(2) / num
    variance, twice = spread[:, drawn].mean(2), spread.var(1)
    # Of normal gradients Var |h|^2 = 2 tr Cov^2, E (h_i m_i)^2 = mu' Cov mu + tr Cov^2 / i and
    # Var |m|^2 = 4 mu' Cov mu / n + 2 tr Cov^2 / n^2.
    steady = np.maximum(0.0, (own**2).mean(1) - twice / 2 * (1 / np.arange(2, num + 1)).mean())
    signals = signal[:, None] + np.outer(np.sqrt(4 * steady / num + twice / num**2), noise)
    true, scale = signal[reference], np.array([[each.scale] for each in baselines])
    share = common / true
    error = np.sqrt(((across - share[:, None] * own[reference]) ** 2).mean(1) / num) / true
    # A share of a gradient that may be 0 is not known.
    measured = share[:, None] + np.outer(error, noise) + (0 if np.quantile(signals[reference], 0.025) > 0 else math.nan)
    scales = np.where(np.isnan(scale), np.where(measured > 0, measured, math.nan), scale)
    sized = {each.size: variance[i] for i, each in enumerate(baselines) if each.size}
    sizes = np.array([np.full(NUM_DRAWS + 1, float(each.size or math.nan)) for each in baselines])
    for i, k in np.argwhere(np.isnan(sizes)) if sized else ():
        sizes[i, k] = find_group_size(variance[i, k] / scales[i, k] ** 2, {s: v[k] for s, v in sized.items()})
    with np.errstate(all="ignore"):
        ratios = np.where(signals > 0, variance / signals, math.inf)
        numbers = {"signal": signal, "scale": share, "cosine": common / np.sqrt(signal * true)}
    for name, draws in (("variance", variance), ("ratio", ratios), ("group_size", sizes)):
        ends = np.quantile(draws[:, 1:], (0.025, 0.975), axis=1, method="nearest")
        numbers |= {name: draws[:, 0], f"{name}_interval": ends.T}
    return [{"baseline": x.name} | {n: v[i].tolist() for n, v in numbers.items()} for i, x in enumerate(baselines)]


def compose(words: Sequence[str]) -> tuple[Config, list[str]]:
    """The configuration, with groups and batches as in the file, and what is to be said of it. Raises ConfigError."""
    files = [word.partition("=")[2] for word in words if word.startswith("rollout.file=")]
    if not files:
        raise ConfigError(["rollout.file: null found; must be the rollouts.jsonl of a run (logger.save_rollouts=true)"])
    if chosen := [word for word in words if word.startswith("algo=")]:
        raise ConfigError([f"{chosen[0]}: has no effect on the plain gradient; a key may be given, as algo.gamma=1"])
    try:
        groups = split_groups(next(read_rollouts(Path(files[-1]).expanduser()))[0].samples)
        if any(sample.response.segment_prompts for group in groups for sample in group):
            raise ValueError(f"{files[-1]}: found episodes of several segments, whose gradient is not measured")
    except (OSError, ValueError) as error:
        raise ConfigError([f"rollout.file: {error}"]) from error
    sizes = f"train.prompts_per_iteration={len(groups)}", f"train.responses_per_prompt={len(groups[0])}"
    loaded = load([*OWN, *sizes, *words])
    return loaded.config, loaded.lines


@contextmanager
def open_worker(spec: WorkerSpec, **changes: Any) -> Iterator[tuple[Any, Path]]:
    """A role alone in this process, whatever its layout is elsewhere, and a folder that is removed after it."""
    from megarl.mcore.worker import MegatronWorker

    own: dict[str, Any] = {"parallel": ParallelConfig(), "optimizer": OptimizerConfig(), "offload": None, **changes}
    with tempfile.TemporaryDirectory() as scratch:
        worker = MegatronWorker(replace(spec, **own), 0, 1, f"file://{scratch}/init")
        try:
            yield worker, Path(scratch)
        finally:
            worker.close()


def take_batches(config: Config, inputs: Inputs) -> list[Experience]:
    """The responses of each batch, disjoint and in random order, with critic.init with values. Raises ConfigError."""
    saved, size = inputs.saved_groups, config.train.num_prompts
    assert saved is not None
    num = min(len(saved.groups) // size, config.train.num_iterations)
    if num < LEAST_BATCHES:
        keys = f"train.prompts_per_iteration={size} and train.num_iterations={config.train.num_iterations}"
        text = f"{len(saved.groups)} groups are {num} batches by {keys}; it takes {LEAST_BATCHES} or more"
        raise ConfigError([f"rollout.file: {text}"])
    source = SavedSource(saved, size, config.seed)
    rollouts = [join_groups(source.take(number, 0).replayed, 0) for number in range(1, num + 1)]
    batches = [build_tensors(rollout, inputs.critic_prompt) for rollout in rollouts]
    values: list[Tensor | None] = [None] * num
    if config.critic.init is not None:
        with open_worker(inputs.specs[Role.critic]) as (critic, _):
            values = [critic.values(each.critic_input).values for each in batches]
    return [x.build_experience(x.rollout_logprobs, values=v) for x, v in zip(batches, values, strict=True)]


def build_samples(config: Config, baseline: Baseline, batches: Sequence[Experience]) -> Iterator[TrainingSamples]:
    """Of each batch, after a first pass from which the estimator has what it learns from one batch to the next."""
    kept = {name: getattr(config.algo, name) for name in KEPT}
    algo, rho = AlgoConfig(surrogate="logprob", **(kept | baseline.changes)), config.algo.tether.initial
    length, wrong = config.rollout.response_length, config.reward.wrong
    load_state(algo)
    for number, batch in enumerate([*batches, *batches]):
        if baseline.size is not None:
            batch = replace(batch, groups=torch.arange(len(batch.groups)) // baseline.size)
        own: dict[str, Any] = {"response_length": length, "wrong": wrong, "tether_rho": rho, "has_old_logprobs": False}
        samples, metrics = compute_targets(batch, algo, 0.0, **own)
        rho = update_rho(rho, metrics, algo.tether)
        if number >= len(batches):
            yield samples.for_policy()


def measure(config: Config, inputs: Inputs) -> dict[str, Any]:
    """What --json writes. Raises ConfigError."""
    train, batches = config.train, take_batches(config, inputs)
    baselines = list_baselines(train.responses_per_prompt, train.num_prompts, config.critic.init is not None)
    reference = max((i for i, each in enumerate(baselines) if each.size), default=0)
    estimates, gaps, started = [Estimate() for _ in baselines], list[Tensor](), time.monotonic()
    algo = AlgoConfig(surrogate="logprob", loss_agg_mode=config.algo.loss_agg_mode)
    samples = [build_samples(config, baseline, batches) for baseline in baselines]
    with open_worker(inputs.specs[Role.policy], algo=algo) as (policy, scratch):
        for number, (batch, *own) in enumerate(zip(batches, *samples, strict=True), start=1):
            logprobs = policy.logprobs(batch.sequences, config.rollout.temperature).values
            gaps.append((batch.rollout_logprobs - logprobs)[batch.mask])
            for i in sorted(range(len(baselines)), key=lambda i: i != reference):
                policy.export_gradient(own[i], scratch / "gradient")
                with CheckpointReader(scratch / "gradient") as reader:
                    gradient = torch.cat([reader.read(name).flatten() for name in sorted(reader.names)])
                estimates[i].add(gradient, number, estimates[reference])
            print(f"batch {number}/{len(batches)}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    found = {"num_batches": len(batches), "num_prompts": train.num_prompts, "group": train.responses_per_prompt}
    kl = float(torch.cat(gaps).double().mean())
    return {**found, "kl": kl, "baselines": summarise(baselines, estimates, reference)}


def format_table(found: Mapping[str, Any]) -> Iterator[str]:
    """A line for each baseline below a header."""

    def show(number: float, name: str) -> str:
        if name == "group_size" and number in (0, math.inf):
            return f"more than {found['group']}" if number else f"less than {SUB_GROUPS[0]}"
        return "-" if math.isnan(number) else f"{number:.3g}"

    def join(row: Mapping[str, Any], name: str) -> str:
        number, (low, high) = show(row[name], name), (show(x, name) for x in row.get(f"{name}_interval", [0, 0]))
        return number if low == high else f"{number} [{low}, {high}]"

    names = ("variance", "signal", "ratio", "cosine", "group_size")
    table = [("baseline", "variance", "signal", "variance / signal", "cosine", "group size")]
    table += [(row["baseline"], *(join(row, name) for name in names)) for row in found["baselines"]]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    yield from ("  ".join(map(str.ljust, line, widths)).rstrip() for line in table)


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("megarl variance", description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the numbers here; null: not known, 1e999: infinity"
    )
    warnings.simplefilter("ignore")
    try:
        options, words = parser.parse_known_args(take_config_dirs(sys.argv[1:]))
        if unknown := [word for word in words if word.startswith("-")]:
            raise ConfigError([f"{unknown[0]}: no such option; {parser.format_usage().strip()} [key=value] ..."])
        check_words(words)
        config, lines = compose(words)
        print("\n".join(lines), end="\n" if lines else "", flush=True)
        found = measure(config, load_inputs(config))
    except ConfigError as error:
        end_with_config_error(error)
    size, prompts, mode = found["group"], found["num_prompts"], config.algo.loss_agg_mode
    print(f"{found['num_batches']} batches of {size * prompts} responses ({prompts} prompts x {size}), {mode}")
    if abs(found["kl"]) > OFF_POLICY:
        print(f"warning: the responses are another policy's, at a KL of {found['kl']:.2g} per token")
    print("\n".join(format_table(found)))
    if options.json is not None:
        text = json.dumps(found, indent=1)
        options.json.write_text(text.replace("Infinity", "1e999").replace("NaN", "null"), encoding="utf-8")


if __name__ == "__main__":
    end_with_closed_pipe()
    main()
