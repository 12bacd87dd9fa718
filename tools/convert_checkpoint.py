"""Checkpoints between Hugging Face's form and Megatron's.

    python tools/convert_checkpoint.py hf-to-megatron SRC DST [--role critic] [--tp N] [--pp N] [--ep N] [--dtype D]
    python tools/convert_checkpoint.py megatron-to-hf SRC DST [--dtype D]
    python tools/convert_checkpoint.py verify A B [--text TEXT]
    python tools/convert_checkpoint.py info DIR

Megatron's form is the directory of one role: what training writes to RUN_DIR/checkpoints/iteration-NNNNNN/policy and
.../critic, of any layout, or what hf-to-megatron writes. Tensors are streamed: memory holds parts of one layer, not the
model. DST appears complete or not at all. Checksums are verified first (--no-verify skips them); NaN, infinity and
tensors that are missing, too many or of another shape are errors.

verify compares every tensor bit by bit, with --text also the logits of the text (a critic's values): Megatron's form
computed by Megatron, Hugging Face's by transformers. That loads both models, one after the other.

Exit code: 0 done or equal, 1 verify found differences, 2 refused.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megarl.mcore.weights.compare import LOGITS_BOUND, compare_outputs, compare_tensors
from megarl.mcore.weights.convert import hf_to_megatron, megatron_to_hf
from megarl.mcore.weights.source import HfSource, MegatronSource, WeightSource, list_roles, open_source
from megarl.mcore.worker_spec import Role
from megarl.models.checkpoint import load_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHOWN = 10
"""Differing tensors that verify lists"""


@contextmanager
def show_progress(what: str, source: WeightSource) -> Iterator[Callable[[int], None]]:
    from tqdm import tqdm

    with tqdm(total=source.num_bytes, desc=what, unit="B", unit_scale=True, file=sys.stderr) as bar:
        yield bar.update


def describe(source: WeightSource) -> Iterator[tuple[str, str]]:
    arch, files = source.arch, [path for path in source.directory.rglob("*") if path.is_file()]
    experts = f", {arch.experts.num_experts} experts" if arch.experts else ""
    yield "kind", source.kind
    yield "role", source.role.value
    yield (
        "model",
        f"{arch.family}, {arch.num_layers} layers, hidden {arch.hidden_size}, vocabulary {arch.vocab_size}{experts}",
    )
    yield "parameters", f"{source.num_parameters:,}"
    yield "dtype", ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in source.dtypes))
    yield "bytes", f"{sum(path.stat().st_size for path in files):,} in {len(files)} files"
    if isinstance(source, MegatronSource):
        yield "layout", " ".join(f"{name}{size}" for name, size in source.about["parallel"].items())
        iteration = source.about.get("iteration")
        yield "iteration", "none" if iteration is None else str(iteration)
        yield "optimizer", "with its state" if source.holds_optimizer else "none, weights alone"


def run_info(args: argparse.Namespace) -> int:
    for number, directory in enumerate(list_roles(args.directory) or [args.directory]):
        with open_source(directory, verify=args.verify) as source:
            if number:
                print()
            print("\n".join(f"{name:<11}{value}" for name, value in [("directory", str(directory)), *describe(source)]))
    return 0


def run_hf_to_megatron(args: argparse.Namespace) -> int:
    role = Role(args.role) if args.role else None
    with open_source(args.source, role=role) as source:
        if not isinstance(source, HfSource):
            raise ValueError(f"{args.source}: is Megatron's already")
        if source.makes_head:
            print(f"{args.source}: has no value head; the critic gets one of zeros", file=sys.stderr)
        with show_progress("hf-to-megatron", source) as report:
            sizes = {"tp": args.tp, "pp": args.pp, "ep": args.ep}
            hf_to_megatron(source, args.target, **sizes, **read_options(args), report=report)
    return 0


def run_megatron_to_hf(args: argparse.Namespace) -> int:
    with open_source(args.source, verify=args.verify) as source:
        if not isinstance(source, MegatronSource):
            raise ValueError(f"{args.source}: is Hugging Face's already")
        with show_progress("megatron-to-hf", source) as report:
            megatron_to_hf(source, args.target, **read_options(args), report=report)
    return 0


def read_options(args: argparse.Namespace) -> dict[str, Any]:
    return {"dtype": DTYPES[args.dtype] if args.dtype else None, "overwrite": args.overwrite}


def run_verify(args: argparse.Namespace) -> int:
    with open_source(args.a, verify=args.verify) as a, open_source(args.b, verify=args.verify) as b:
        with show_progress("verify", a) as report:
            differences = compare_tensors(a, b, report)
        total = sum(len(entry.hf_names) for entry in a.entries)
        print(f"tensors: {total - len(differences)} of {total} equal bit by bit")
        for difference in differences[:SHOWN]:
            print(f"  {difference}")
        if len(differences) > SHOWN:
            print(f"  and {len(differences) - SHOWN} more")
        equal = not differences
        if args.text is not None:
            tokens = torch.tensor(load_tokenizer(a.description)(args.text)["input_ids"])
            outputs = compare_outputs(a, b, tokens)
            print(outputs)
            equal = equal and outputs.relative <= LOGITS_BOUND
    print("equal" if equal else "DIFFERENT")
    return 0 if equal else 1


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="megarl convert", description=__doc__, formatter_class=form)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], *paths: tuple[str, str]) -> argparse.ArgumentParser:
        command = commands.add_parser(name)
        for path, shown in paths:
            command.add_argument(path, metavar=shown, type=Path)
        command.set_defaults(run=run)
        return command

    to_megatron = add("hf-to-megatron", run_hf_to_megatron, ("source", "SRC"), ("target", "DST"))
    to_megatron.add_argument("--role", choices=["policy", "critic"], help="default: critic where there is a value head")
    for size, what in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert")):
        to_megatron.add_argument(f"--{size}", type=int, default=1, help=f"{what}-parallel ranks to cut it for")
    to_hf = add("megatron-to-hf", run_megatron_to_hf, ("source", "SRC"), ("target", "DST"))
    verify = add("verify", run_verify, ("a", "A"), ("b", "B"))
    verify.add_argument("--text", help="also compare the logits of this text, or a critic's values")
    info = add("info", run_info, ("directory", "DIR"))
    for command in (to_megatron, to_hf):
        command.add_argument("--dtype", choices=DTYPES, help="of the weights written; default: as they are")
        command.add_argument("--overwrite", action="store_true", help="replace DST where it exists")
    for command in (to_hf, verify, info):
        command.add_argument("--no-verify", dest="verify", action="store_false", help="do not check the checksums")
    args = parser.parse_args(argv)
    if any(getattr(args, size, 1) < 1 for size in ("tp", "pp", "ep")):
        parser.error("--tp, --pp and --ep must be 1 or more")
    return args


def run(argv: list[str]) -> int:
    """The exit code."""
    args = parse_arguments(argv)
    try:
        code: int = args.run(args)
        return code
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(run(sys.argv[1:]))
