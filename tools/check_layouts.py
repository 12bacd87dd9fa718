"""Does your model compute the same under every parallel layout? One table, one verdict.

    python tools/check_layouts.py [--processes 4] [--rows N] [key=value ...]

For the configuration that `python -m megarl.train key=value ...` would run: policy and critic take three Adam steps on
one synthetic minibatch of its sizes (random tokens, ragged lengths, old log-probs and values near the model's own)
under every layout that fits 1, 2 ... N processes and that the model and Megatron allow, and with micro-batches a
quarter as large; each is compared with one process. No server is started. Adam's epsilon is 1e-5 at least: a smaller
one turns rounding in tiny gradients into whole steps.

Bounds: the loss relative to the mean |L_t|, the gradient norm and each gradient tensor relative to its norm, what
three steps changed relative to its norm. They follow the role's dtype: in bfloat16 rounding alone is large, and only
gross faults show; policy.dtype=float32 critic.dtype=float32 shows all of them.

Exit code: 0 all equal, 1 some differ or fail, 2 the configuration is refused.
"""

import argparse
import itertools
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from megarl.config.checks.config import check_config
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.schema.roles import Dtype, ParallelConfig
from megarl.config.schema.root import Config
from megarl.config.search_path import take_config_dirs
from megarl.mcore.compare_layouts import (
    Bounds,
    LayoutDifference,
    LayoutRun,
    compare_runs,
    describe_layout,
    run_layouts,
)
from megarl.mcore.model.architecture import Architecture, check_layout
from megarl.mcore.role_fields import check_role_fields
from megarl.mcore.worker_spec import Role, WorkerSpec
from megarl.models.checkpoint import load_tokenizer
from megarl.run.inputs import Models, load_models, load_specs
from megarl.types import Sequences, TrainingSamples

NUM_STEPS = 3
LEAST_EPS = 1e-5
BOUNDS = {Dtype.float32: Bounds(), Dtype.bfloat16: Bounds(loss=2e-2, gradient=1e-1, update=5e-1)}
ONE = "one"
HEADER = "| | layout | processes | loss | grad norm | loss differs | gradient differs | update differs | largest | |"
RULE = "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"


@dataclass(frozen=True)
class Outcome:
    """A line of the table."""

    role: Role
    name: str
    num_processes: int
    difference: LayoutDifference | None
    problems: tuple[str, ...]
    """What is beyond its bound, or why nothing was computed; empty: equal"""

    def __str__(self) -> str:
        cells = ["-"] * 6
        if (found := self.difference) is not None:
            cells = [f"{found.loss:.6g}", f"{found.grad_norm:.6g}", f"{found.loss_difference:.1e}"]
            cells += [f"{found.gradient_difference:.1e}", f"{found.update_difference:.1e}"]
            cells += [f"{found.parameter_difference:.1e}"]
        verdict = "; ".join(self.problems) or "equal"
        return f"| {' | '.join([self.role.value, self.name, str(self.num_processes), *cells, verdict])} |"


def list_layouts(
    num_processes: int, num_layers: int, is_allowed: Callable[[ParallelConfig], bool]
) -> list[ParallelConfig]:
    """Every allowed layout of the process counts that divide `num_processes`, by their number.

    Of pieces per pipeline stage (vpp), one and the fewest allowed above one; of ranks that share an expert's matrices
    (etp), one and as many as share the other matrices.
    """
    layouts = []
    for size in list_divisors(num_processes):
        for layout in _propose(size):
            pieces = [replace(layout, vpp=n) for n in list_divisors(num_layers)[1:]] if layout.pp > 1 else []
            layouts += [*filter(is_allowed, [layout]), *itertools.islice(filter(is_allowed, pieces), 1)]
    return layouts


def _propose(num_processes: int) -> Iterator[ParallelConfig]:
    """Layouts of that many processes, whether or not they are allowed."""
    for tp, pp, cp, ep in itertools.product(list_divisors(num_processes), repeat=4):
        for sp, etp in itertools.product((False, True), sorted({1, tp})):
            if tp * pp * cp <= num_processes and ep * etp * pp <= num_processes:
                yield ParallelConfig(num_processes=num_processes, tp=tp, sp=sp, pp=pp, cp=cp, ep=ep, etp=etp)


def list_divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def find_layout_problems(
    config: Config, architecture: Architecture, spec: WorkerSpec, layout: ParallelConfig
) -> list[str]:
    """Why `megarl.train` would refuse the layout for the role of `spec`; empty: it fits."""
    role = spec.role.value
    node = replace(getattr(config, role), parallel=layout)
    return [
        *check_config(replace(config, **{role: node})),
        *check_layout(architecture, layout, f"{role}.parallel"),
        *check_role_fields(architecture, replace(spec, parallel=layout)),
    ]


def make_sequences(config: Config, vocabulary: Tensor, num_rows: int) -> Sequences:
    """Random tokens of `vocabulary`; prompts and responses of any length up to the configured ones, a pair of the
    longest.
    """
    generator = torch.Generator().manual_seed(config.seed)
    prompts, responses = (
        torch.randint(1, longest + 1, (num_rows,), generator=generator)
        for longest in (config.data.prompt_length, config.rollout.response_length)
    )
    prompts[0], responses[0] = config.data.prompt_length, config.rollout.response_length
    picked = torch.randint(0, len(vocabulary), (int((prompts + responses).sum()),), generator=generator)
    return Sequences(vocabulary[picked], prompts + responses, prompts)


def lengthen_prompts(sequences: Sequences, vocabulary: Tensor, most: int, seed: int) -> Sequences:
    """The same with 1 to `most` random tokens in front of each prompt, as data.critic_prompt puts them there."""
    generator = torch.Generator().manual_seed(seed)
    added = torch.randint(1, most + 1, (sequences.num_samples,), generator=generator)
    rows = zip(added.tolist(), torch.split(sequences.tokens, sequences.lengths.tolist()), strict=True)
    pieces = [
        piece
        for number, row in rows
        for piece in (vocabulary[torch.randint(0, len(vocabulary), (number,), generator=generator)], row)
    ]
    return Sequences(torch.cat(pieces), sequences.lengths + added, sequences.prompt_lengths + added)


def find_vocabulary(checkpoint: Path, vocab_size: int) -> Tensor:
    """Token ids that text has. The embedding of padding may be zero, where the gradient of a norm is enormous."""
    tokenizer = load_tokenizer(checkpoint)
    return torch.tensor(sorted(set(range(min(len(tokenizer), vocab_size))) - set(tokenizer.all_special_ids)))


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
        result = worker.values(sequences) if critic else worker.logprobs(sequences, spec.temperature)
        values: Tensor = result.values
        return values
    finally:
        worker.close()


def run_all(
    specs: dict[str, WorkerSpec], samples: TrainingSamples, scratch: Path
) -> tuple[dict[str, LayoutRun], dict[str, str]]:
    """What each layout computed, and why others did not."""
    deadline_s = next(iter(specs.values())).deadline_s
    try:
        together = scratch / "together"
        together.mkdir(parents=True)
        return run_layouts(specs, samples, NUM_STEPS, together, deadline_s), {}
    except (ProcessRaisedException, ProcessExitedException, TimeoutError) as error:
        if len(specs) == 1:
            return {}, dict.fromkeys(specs, str(error).strip().splitlines()[-1])
    # One of them failed and took the others along: each by itself.
    runs: dict[str, LayoutRun] = {}
    failures: dict[str, str] = {}
    for number, (name, spec) in enumerate(specs.items()):
        found, failed = run_all({name: spec}, samples, scratch / str(number))
        runs |= found
        failures |= failed
    return runs, failures


def check_role(
    spec: WorkerSpec, layouts: list[ParallelConfig], samples: TrainingSamples, scratch: Path
) -> Iterator[Outcome]:
    """One outcome per layout, the first of one process; as soon as those of as many processes are done.

    Raises RuntimeError where one process alone fails.
    """
    assert spec.optimizer is not None
    optimizer = replace(spec.optimizer, eps=max(spec.optimizer.eps, LEAST_EPS))
    alone = replace(spec, optimizer=optimizer, parallel=ParallelConfig())
    quarter = max(1, min(spec.tokens_per_microbatch, int(samples.sequences.lengths.sum())) // 4)
    specs = {ONE: alone, "one-small-microbatches": replace(alone, tokens_per_microbatch=quarter)}
    specs |= {
        describe_layout(layout): replace(alone, parallel=layout) for layout in layouts if layout != alone.parallel
    }
    reference = None
    for size in sorted({each.parallel.num_processes for each in specs.values()}):
        group = {name: each for name, each in specs.items() if each.parallel.num_processes == size}
        runs, failures = run_all(group, samples, scratch / f"{spec.role.value}-{size}")
        if reference is None and ONE not in runs:
            raise RuntimeError(f"{spec.role.value}: one process alone fails: {failures[ONE]}")
        reference = reference or runs[ONE]
        for name in group:
            if name in failures:
                yield Outcome(spec.role, name, size, None, (f"failed: {failures[name]}",))
                continue
            difference = compare_runs(runs[name], reference)
            yield Outcome(spec.role, name, size, difference, tuple(difference.find_problems(BOUNDS[spec.dtype])))


def describe_bounds(spec: WorkerSpec) -> str:
    bounds = BOUNDS[spec.dtype]
    return (
        f"{spec.role.value}: {spec.dtype.value}; equal means a loss within {bounds.loss:g} of mean |L_t|, gradients"
        f" within {bounds.gradient:g} of their norms, the update of {NUM_STEPS} steps within"
        f" {bounds.update:g} of its norm"
    )


def check_all(
    config: Config,
    models: Models,
    specs: dict[Role, WorkerSpec],
    sequences: Sequences,
    num_processes: int,
    critic_sequences: Sequences | None = None,
) -> list[Outcome]:
    """Prints the table as it grows. critic_sequences: what the critic reads, with data.critic_prompt."""
    trained = [spec for role, spec in specs.items() if role is not Role.reference]
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="megarl-layouts-") as directory:
        scratch = Path(directory)
        read = dict.fromkeys(Role, sequences) | {Role.critic: critic_sequences or sequences}
        found = {spec.role: evaluate_alone(spec, read[spec.role], scratch) for spec in trained}
        samples = make_samples(sequences, found[Role.policy], found.get(Role.critic), config.seed)
        print(f"{sequences.num_samples} sequences, {int(sequences.lengths.sum())} tokens")
        print(*map(describe_bounds, trained), "", HEADER, RULE, sep="\n", flush=True)
        for spec in trained:
            arch = models.critic_architecture if spec.role is Role.critic else models.architecture

            def is_allowed(layout: ParallelConfig, spec: WorkerSpec = spec, arch: Architecture = arch) -> bool:
                return not find_layout_problems(config, arch, spec, layout)

            layouts = list_layouts(num_processes, arch.num_layers, is_allowed)
            given = replace(samples, sequences=read[spec.role])
            for outcome in check_role(spec, layouts, given, scratch):
                outcomes.append(outcome)
                print(outcome, flush=True)
    return outcomes


def conclude(outcomes: list[Outcome]) -> tuple[str, int]:
    """The last line and the exit code."""
    wrong = [f"{outcome.role.value} {outcome.name}" for outcome in outcomes if outcome.problems]
    if wrong:
        return f"DIFFERENT: {len(wrong)} of {len(outcomes)}: {', '.join(wrong)}", 1
    return f"equal: all {len(outcomes)} compute what one process computes", 0


def parse_arguments() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="megarl check-layouts", description=__doc__, formatter_class=form)
    parser.add_argument("--processes", type=int, default=4, help="most processes of a layout")
    parser.add_argument("--rows", type=int, help="samples of the minibatch; default: train.samples_per_minibatch")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for megarl.train")
    args = parser.parse_args(take_config_dirs(sys.argv[1:]))
    if args.processes < 1 or (args.rows is not None and args.rows < 1):
        parser.error("--processes and --rows must be 1 or more")
    return args


def hide_warnings() -> None:
    """Those of libraries, here and in the processes that are started; each of them would repeat them."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")


def main() -> None:
    try:
        args = parse_arguments()
        hide_warnings()
        config = load_config(args.overrides)
        models = load_models(config)
        specs = load_specs(config, models)
        vocabulary = find_vocabulary(models.checkpoint, models.architecture.vocab_size)
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    sequences = make_sequences(config, vocabulary, args.rows or config.train.minibatch_size)
    most = config.data.num_critic_tokens if Role.critic in specs else 0
    longer = lengthen_prompts(sequences, vocabulary, most, config.seed) if most else None
    verdict, code = conclude(check_all(config, models, specs, sequences, args.processes, longer))
    print(f"\n{verdict}")
    sys.exit(code)


if __name__ == "__main__":
    main()
