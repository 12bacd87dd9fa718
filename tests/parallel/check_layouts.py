"""Does a model compute the same under every parallel layout? One table, one verdict.

    python tests/parallel/check_layouts.py [--processes 4] [--rows N] [key=value ...]

For the configuration that `megarl train key=value ...` would run: policy and critic take three Adam steps on one
minibatch of random tokens under every layout that fits 1, 2 ... N processes and that the model and Megatron allow; each
is compared with one process, by its losses, gradients and updates. A layout changes who computes what, and nothing of
the result but rounding. No server is started. Adam's epsilon is 1e-5 at least: a smaller one turns rounding in tiny
gradients into whole steps. In bfloat16 rounding alone is large, and only gross faults show.

Exit code: 0 all equal, 1 some differ, 2 the configuration is refused.
"""

import argparse
import itertools
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1] / "unit" / room) for room in ("mcore", "algo")]

import torch
from layout_runs import Run, read, run_specs
from tiny_checkpoints import build_samples
from torch import Tensor

from megarl.config.checks import check_config
from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.config.overrides import take_config_dirs
from megarl.config.schema.roles import Dtype, ParallelConfig
from megarl.config.schema.root import Config
from megarl.mcore.checkpoints import write_safetensors
from megarl.mcore.entries import VALUE_HEAD
from megarl.mcore.spec import Role, WorkerSpec, check_layout, check_role_fields, read_architecture
from megarl.models.architecture import Architecture
from megarl.models.checkpoint import load_tokenizer
from megarl.run.inputs import load_models, load_specs
from megarl.types import TrainingSamples

LEAST_EPS = 1e-5
FLOAT32 = {"loss": 1e-6, "gradient norm": 1e-5, "gradient": 1e-5, "update": 1e-3, "evaluation": 2e-5}
"""Up to which a relative difference is rounding: of mean |L_t|, of the norm before clipping, of a tensor's gradient in
the first step, of what all steps together changed; an absolute one of log-probs and values after them"""
BOUNDS = {Dtype.float32: FLOAT32, Dtype.bfloat16: dict.fromkeys(FLOAT32, 1e-1) | {"loss": 2e-2, "update": 5e-1}}


VERBS = "weights:before gradient:gradient update:3 weights:after evaluate details"
"""Three optimizer steps over all samples, and what a layout must not change of them"""


def describe_layout(parallel: ParallelConfig) -> str:
    """A short name: tp2-sp-pp2, one."""
    sizes = {name: getattr(parallel, name) for name in ("tp", "sp", "pp", "vpp", "cp", "dp", "ep", "etp")}
    parts = ["sp" if name == "sp" else f"{name}{size}" for name, size in sizes.items() if size is True or size > 1]
    return "-".join(parts) or "one"


def run_layouts(
    scratch: Path, specs: Mapping[str, Any], samples: TrainingSamples, verbs: str = VERBS
) -> dict[str, Run]:
    """The same under each spec, as `run_specs` runs them. A critic whose checkpoint has no value head gets a random
    one: its own head of zeros would leave all other gradients at zero.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    given = {name: spec if isinstance(spec, tuple) else (spec, {}) for name, spec in specs.items()}
    given = {name: (_start_with_value_head(spec, scratch), own) for name, (spec, own) in given.items()}
    return run_specs(scratch, given, verbs, samples=samples, sequences=(samples.sequences,))


def _start_with_value_head(spec: WorkerSpec, scratch: Path) -> WorkerSpec:
    """The spec; of a critic without a value head, with a copy of its checkpoint that has one."""
    source = Path(spec.checkpoint).resolve()
    if spec.role is not Role.critic or VALUE_HEAD in (tensors := read(source)):
        return spec
    directory = scratch / f"critic-{source.name}"
    if not directory.exists():
        skipped = shutil.ignore_patterns("*.safetensors*")
        shutil.copytree(source, directory, ignore=skipped)
        size = read_architecture(source).hidden_size
        tensors[VALUE_HEAD] = torch.randn(1, size, generator=torch.Generator().manual_seed(spec.seed)) / size**0.5
        write_safetensors(directory, tensors.items())
    return replace(spec, checkpoint=str(directory))


def compare_runs(run: Run, reference: Run) -> dict[str, float]:
    """The largest differences, by the names of `FLOAT32`; with the name of the tensor whose gradient differs most."""
    losses, norms = (
        torch.tensor([one.list_metrics(name) for one in (run, reference)], dtype=torch.float64)
        for name in ("loss", "grad_norm")
    )
    # Terms of either sign cancel in a loss, not in this. A critic's are never negative.
    sizes = torch.tensor(reference.list_metrics("loss_size", "loss"), dtype=torch.float64)
    gradients, expected = run.read("gradient"), reference.read("gradient")
    assert gradients.keys() == expected.keys(), "runs of other models"
    each = {name: _compare(gradients[name], tensor) for name, tensor in expected.items()}
    worst = max(each, key=each.__getitem__)
    changes = []
    for one in (run, reference):
        before, after = one.read("before"), one.read("after")
        changes.append(torch.cat([(after[name].double() - before[name].double()).flatten() for name in after]))
    evaluations = [
        (found - other).abs().max()
        for kind in ("evaluate", "reference_kl")
        for found, other in zip(run.found.get(kind, []), reference.found.get(kind, []), strict=True)
    ]
    differences = {
        "loss": ((losses[0] - losses[1]).abs() / sizes).max().item(),
        "gradient norm": ((norms[0] - norms[1]).abs() / norms[1]).max().item(),
        f"gradient of {worst}": each[worst],
        "update": _compare(*changes),
        "evaluation": torch.stack(evaluations).max().item(),
    }
    return {what: difference if difference == difference else float("inf") for what, difference in differences.items()}


def _compare(found: Tensor, expected: Tensor) -> float:
    """||difference|| / ||expected||; 0 where both are 0, infinite where there is no number."""
    difference, size = (found.double() - expected.double()).norm().item(), expected.double().norm().item()
    if difference == size == 0:
        return 0.0
    return difference / size if size and difference == difference else float("inf")


def find_problems(differences: Mapping[str, float], bounds: Mapping[str, float] = FLOAT32) -> list[str]:
    """What is beyond its bound; empty: the layout computes the same."""
    found = {what: (difference, bounds[what.partition(" of ")[0]]) for what, difference in differences.items()}
    return [f"{what}: differs by {x:.2g}; the bound is {bound:.2g}" for what, (x, bound) in found.items() if x > bound]


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


def is_allowed(config: Config, architecture: Architecture, spec: WorkerSpec, layout: ParallelConfig) -> bool:
    """Whether `megarl train` would take the layout for the role of `spec`."""
    role = spec.role.value
    node = replace(getattr(config, role), parallel=layout)
    problems = itertools.chain(
        check_config(replace(config, **{role: node})),
        check_layout(architecture, layout, f"{role}.parallel"),
        check_role_fields(architecture, replace(spec, parallel=layout)),
    )
    return next(iter(problems), None) is None


def check_all(overrides: list[str], num_processes: int, num_rows: int | None) -> tuple[int, list[str]]:
    """Prints the table as it grows. The number of layouts, and which of them differ."""
    config = load_config(overrides)
    models = load_models(config)
    tokenizer = load_tokenizer(models.checkpoint)
    # The embedding of padding may be zero, where the gradient of a norm is enormous.
    ids = torch.tensor(sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids)))
    samples = build_samples(num_rows or config.train.minibatch_size)
    samples = replace(samples, sequences=replace(samples.sequences, tokens=ids[samples.sequences.tokens % len(ids)]))
    print(f"| | layout | processes | {' | '.join(FLOAT32)} | |", "| --- " * 9 + "|", sep="\n")
    count, wrong = 0, []
    for role, spec in load_specs(config, models).items():
        if spec.optimizer is None:
            continue
        spec = replace(spec, optimizer=replace(spec.optimizer, eps=max(spec.optimizer.eps, LEAST_EPS)))
        arch = models.critic_architecture if role is Role.critic else models.architecture
        layouts = list_layouts(
            num_processes,
            arch.num_layers,
            lambda layout, spec=spec, arch=arch: is_allowed(config, arch, spec, layout),
        )
        specs = {describe_layout(layout): replace(spec, parallel=layout) for layout in layouts}
        with tempfile.TemporaryDirectory(prefix="megarl-layouts-") as scratch:
            runs = run_layouts(Path(scratch), specs, samples)
            for name, run in runs.items():
                differences = compare_runs(run, runs["one"])
                problems = find_problems(differences, BOUNDS[spec.dtype])
                count, wrong = count + 1, wrong + [f"{role.value} {name}"] * bool(problems)
                cells = [role.value, name, str(specs[name].parallel.num_processes)]
                cells += [f"{difference:.1e}" for difference in differences.values()]
                print(f"| {' | '.join([*cells, '; '.join(problems) or 'equal'])} |", flush=True)
    return count, wrong


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
