"""Does a model compute the same under every parallel layout? One table, one verdict.

    python tests/parallel/check_layouts.py [--processes 4] [--rows N] [key=value ...]

For the configuration that `megarl train key=value ...` would run: policy and critic take three Adam steps on one
synthetic minibatch of its sizes (random tokens, ragged lengths, old log-probs and values near the model's own) under
every layout that fits 1, 2 ... N processes and that the model and Megatron allow; each is compared with one process,
within the bounds of `compare_layouts`. No server is started. Adam's epsilon is 1e-5 at least: a smaller one turns
rounding in tiny gradients into whole steps. In bfloat16 rounding alone is large, and only gross faults show.

Exit code: 0 all equal, 1 some differ, 2 the configuration is refused.
"""

import argparse
import itertools
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from compare_layouts import Bounds, LayoutDifference, compare_runs, describe_layout, run_layouts
from torch import Tensor

from megarl.config.checks.config import check_config
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.overrides import take_config_dirs
from megarl.config.schema.roles import Dtype, ParallelConfig
from megarl.config.schema.root import Config
from megarl.mcore.spec import (
    Role,
    WorkerSpec,
    check_layout,
    check_role_fields,
)
from megarl.models.architecture import Architecture
from megarl.models.checkpoint import load_tokenizer
from megarl.run.inputs import load_models, load_specs
from megarl.types import Sequences, TrainingSamples

NUM_STEPS = 3
LEAST_EPS = 1e-5
BOUNDS = {Dtype.float32: Bounds(), Dtype.bfloat16: Bounds(loss=2e-2, gradient=1e-1, update=5e-1)}
HEADER = "| | layout | processes | loss | grad norm | loss differs | gradient differs | update differs | largest | |"
RULE = "| --- " * 10 + "|"


def list_divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def list_layouts(
    num_processes: int, num_layers: int, is_allowed: Callable[[ParallelConfig], bool]
) -> list[ParallelConfig]:
    """Every allowed layout of the process counts that divide `num_processes`, by their number.

    Of pieces per pipeline stage (vpp), one and the fewest allowed above one; of ranks that share an expert's matrices
    (etp), one and as many as share the other matrices.
    """
    layouts = []
    for size in list_divisors(num_processes):
        for layout in propose(size):
            pieces = [replace(layout, vpp=n) for n in list_divisors(num_layers)[1:]] if layout.pp > 1 else []
            layouts += [*filter(is_allowed, [layout]), *itertools.islice(filter(is_allowed, pieces), 1)]
    return layouts


def propose(num_processes: int) -> Iterator[ParallelConfig]:
    """Layouts of that many processes, whether or not they are allowed."""
    for tp, pp, cp, ep in itertools.product(list_divisors(num_processes), repeat=4):
        for sp, etp in itertools.product((False, True), sorted({1, tp})):
            if tp * pp * cp <= num_processes and ep * etp * pp <= num_processes:
                yield ParallelConfig(num_processes=num_processes, tp=tp, sp=sp, pp=pp, cp=cp, ep=ep, etp=etp)


def find_layout_problems(
    config: Config, architecture: Architecture, spec: WorkerSpec, layout: ParallelConfig
) -> list[str]:
    """Why `megarl train` would refuse the layout for the role of `spec`; empty: it fits."""
    role = spec.role.value
    node = replace(getattr(config, role), parallel=layout)
    return [
        *check_config(replace(config, **{role: node})),
        *check_layout(architecture, layout, f"{role}.parallel"),
        *check_role_fields(architecture, replace(spec, parallel=layout)),
    ]


def make_sequences(config: Config, checkpoint: Path, vocab_size: int, num_rows: int) -> Sequences:
    """Random tokens that text has (the embedding of padding may be zero, where the gradient of a norm is enormous);
    prompts and responses of any length up to the configured ones, a pair of the longest.
    """
    tokenizer = load_tokenizer(checkpoint)
    ids = set(range(min(len(tokenizer), vocab_size))) - set(tokenizer.all_special_ids)
    generator = torch.Generator().manual_seed(config.seed)
    longest = (config.data.prompt_length, config.rollout.response_length)
    prompts, responses = (torch.randint(1, most + 1, (num_rows,), generator=generator) for most in longest)
    prompts[0], responses[0] = longest
    picked = torch.randint(0, len(ids), (int((prompts + responses).sum()),), generator=generator)
    return Sequences(torch.tensor(sorted(ids))[picked], prompts + responses, prompts)


def make_samples(sequences: Sequences, logprobs: Tensor, values: Tensor | None, seed: int) -> TrainingSamples:
    """Targets near what the models say (both float32 [B, T]), so that ratios are near 1 and little is clipped."""
    generator = torch.Generator().manual_seed(seed)
    exists = torch.arange(logprobs.shape[1]) < sequences.response_lengths[:, None]
    mask = exists & (torch.rand(exists.shape, generator=generator) > 0.1)
    mask[:, 0] = True

    def near(center: Tensor | float, deviation: float) -> Tensor:
        return (center + deviation * torch.randn(exists.shape, generator=generator)) * exists

    old_logprobs = near(logprobs, 0.1)
    return TrainingSamples(
        sequences=sequences,
        mask=mask,
        loss_mask=mask & (torch.rand(len(mask), generator=generator) > 0.1)[:, None],
        positive=torch.rand(len(mask), generator=generator) > 0.5,
        advantages=near(0.0, 1.0),
        rollout_logprobs=near(old_logprobs, 0.01),
        old_logprobs=old_logprobs,
        sampling_logprobs=near(old_logprobs, 0.01),
        ref_logprobs=near(logprobs, 0.1),
        old_values=None if values is None else near(values, 0.1),
        returns=None if values is None else near(values, 0.5),
    )


def evaluate_alone(spec: WorkerSpec, sequences: Sequences, scratch: Path) -> Tensor:
    """float32 [B, T] log-probs or values of the response tokens by one process, this one."""
    from megarl.mcore.worker import MegatronWorker

    init_method = f"file://{scratch}/{spec.role.value}-alone.init"
    worker = MegatronWorker(replace(spec, parallel=ParallelConfig()), 0, 1, init_method)
    try:
        critic = spec.role is Role.critic
        return (worker.values(sequences) if critic else worker.logprobs(sequences, spec.temperature)).values
    finally:
        worker.close()


def check_role(
    spec: WorkerSpec, layouts: list[ParallelConfig], samples: TrainingSamples, scratch: Path
) -> Iterator[tuple[str, int, LayoutDifference]]:
    """Name, processes and difference of each layout, the first of one process; as soon as those of as many are done."""
    alone = replace(spec, optimizer=replace(spec.optimizer, eps=max(spec.optimizer.eps, LEAST_EPS)))
    reference = None
    for size, group in itertools.groupby(layouts, lambda layout: layout.num_processes):
        specs = {describe_layout(layout): replace(alone, parallel=layout) for layout in group}
        runs = run_layouts(specs, samples, NUM_STEPS, scratch / f"{spec.role.value}-{size}", spec.deadline_s)
        reference = reference or runs["one"]
        yield from ((name, size, compare_runs(run, reference)) for name, run in runs.items())


def check_all(overrides: list[str], num_processes: int, num_rows: int | None) -> tuple[int, list[str]]:
    """Prints the table as it grows. The number of layouts, and which of them differ."""
    config = load_config(overrides)
    models = load_models(config)
    trained = [spec for role, spec in load_specs(config, models).items() if role is not Role.reference]
    count, wrong = 0, []
    with tempfile.TemporaryDirectory(prefix="megarl-layouts-") as directory:
        scratch, rows = Path(directory), num_rows or config.train.minibatch_size
        sequences = make_sequences(config, models.checkpoint, models.architecture.vocab_size, rows)
        found = {spec.role: evaluate_alone(spec, sequences, scratch) for spec in trained}
        samples = make_samples(sequences, found[Role.policy], found.get(Role.critic), config.seed)
        print(f"{sequences.num_samples} sequences, {int(sequences.lengths.sum())} tokens", HEADER, RULE, sep="\n")
        for spec in trained:
            arch = models.critic_architecture if spec.role is Role.critic else models.architecture
            layouts = list_layouts(
                num_processes,
                arch.num_layers,
                lambda layout, spec=spec, arch=arch: not find_layout_problems(config, arch, spec, layout),
            )
            for name, size, difference in check_role(spec, layouts, samples, scratch):
                problems = difference.find_problems(BOUNDS[spec.dtype])
                count, wrong = count + 1, wrong + [f"{spec.role.value} {name}"] * bool(problems)
                print(write_row(spec.role, name, size, difference, problems), flush=True)
    return count, wrong


def write_row(role: Role, name: str, size: int, found: LayoutDifference, problems: list[str]) -> str:
    differences = (found.loss_difference, found.gradient_difference, found.update_difference)
    cells = [f"{found.loss:.6g}", f"{found.grad_norm:.6g}"]
    cells += [f"{difference:.1e}" for difference in (*differences, found.parameter_difference)]
    return f"| {' | '.join([role.value, name, str(size), *cells, '; '.join(problems) or 'equal'])} |"


def main() -> None:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--processes", type=int, default=4, help="most processes of a layout")
    parser.add_argument("--rows", type=int, help="samples of the minibatch; default: train.samples_per_minibatch")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for megarl train")
    # Of libraries, here and in the processes that are started; each of them would repeat them.
    warnings.simplefilter("ignore")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    try:
        args = parser.parse_args(take_config_dirs(sys.argv[1:]))
        count, wrong = check_all(args.overrides, args.processes, args.rows)
    except ConfigError as error:
        print(*(f"error: {problem}" for problem in error.problems), sep="\n", file=sys.stderr)
        sys.exit(2)
    if wrong:
        print(f"\nDIFFERENT: {len(wrong)} of {count}: {', '.join(wrong)}")
    else:
        print(f"\nequal: all {count} compute what one process computes")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
