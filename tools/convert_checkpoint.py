"""Checkpoints between Hugging Face's form and Megatron's.

    megarl convert hf-to-megatron SRC DST [--role critic] [--dtype D] [--overwrite]
    megarl convert megatron-to-hf SRC DST [--dtype D] [--overwrite] [--no-verify]
    megarl convert verify A B [--text TEXT] [--no-verify]
    megarl convert info DIR [--no-verify]

Megatron's form is the directory of one role: what training writes to RUN_DIR/checkpoints/iteration-NNNNNN/policy and
.../critic, of any layout, or what hf-to-megatron writes, which any layout reads. The model is in host memory, without a
GPU. DST appears complete or not at all. Checksums are verified first (--no-verify skips them); NaN, infinity and
tensors that are missing, too many or of another shape are errors.

verify compares every tensor bit by bit, with --text also the logits of the text (a critic's values): Megatron's form
computed by Megatron, Hugging Face's by transformers.

Exit code: 0 done or equal, 1 verify found differences, 2 refused.
"""

import argparse
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megarl.config.schema.roles import Dtype
from megarl.mcore.spec import Role
from megarl.models.checkpoint import load_tokenizer

if TYPE_CHECKING:
    # Megatron, at whose import it is settled whether there is a GPU, comes with a command.
    from megarl.mcore import convert

SHOWN = 10
"""Differing tensors that verify lists"""


def describe(source: "convert.Source") -> Iterator[tuple[str, str]]:
    arch, files = source.arch, [path for path in source.directory.rglob("*") if path.is_file()]
    experts = f", {arch.experts.num_experts} experts" if arch.experts else ""
    yield "kind", "Hugging Face" if source.about is None else "Megatron"
    yield "role", source.role.value
    yield (
        "model",
        f"{arch.family}, {arch.num_layers} layers, hidden {arch.hidden_size}, vocabulary {arch.vocab_size}{experts}",
    )
    yield "parameters", f"{source.num_parameters:,}"
    yield "dtype", ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in source.dtypes))
    yield "bytes", f"{sum(path.stat().st_size for path in files):,} in {len(files)} files"
    if source.about is not None:
        yield "layout", " ".join(f"{name}{size}" for name, size in source.about["parallel"].items())
        iteration = source.about.get("iteration")
        yield "iteration", "none" if iteration is None else str(iteration)
        yield "optimizer", "with its state" if source.holds_optimizer else "none, weights alone"


def run_info(args: argparse.Namespace) -> int:
    from megarl.mcore import convert

    for number, directory in enumerate(convert.list_roles(args.directory) or [args.directory]):
        source = convert.open_source(directory, verify=args.verify)
        lines = [f"{name:<11}{value}" for name, value in [("directory", str(directory)), *describe(source)]]
        print(*[""] * bool(number), *lines, sep="\n")
    return 0


def run_convert(args: argparse.Namespace) -> int:
    from megarl.mcore import convert

    role = Role(args.role) if args.role else None
    source = convert.open_source(args.source, role=role, verify=args.verify)
    if (source.about is None) is not args.from_hf:
        raise ValueError(f"{args.source}: is {'Megatron' if args.from_hf else 'Hugging Face'}'s already")
    if source.makes_head:
        print(f"{args.source}: has no value head; the critic gets one of zeros", file=sys.stderr)
    dtype = Dtype(args.dtype) if args.dtype else None
    convert.convert(source, args.target, dtype=dtype, overwrite=args.overwrite)
    return 0


def run_verify(args: argparse.Namespace) -> int:
    from megarl.mcore import convert

    a, b = (convert.open_source(directory, verify=args.verify) for directory in (args.a, args.b))
    differences = convert.compare_tensors(a, b)
    print(f"tensors: {len(a.shapes) - len(differences)} of {len(a.shapes)} equal bit by bit")
    print(*(f"  {difference}" for difference in differences[:SHOWN]), sep="\n", end="\n" * bool(differences))
    if len(differences) > SHOWN:
        print(f"  and {len(differences) - SHOWN} more")
    equal = not differences
    if args.text is not None:
        tokens = torch.tensor(load_tokenizer(a.description)(args.text)["input_ids"])
        found, is_rounding = convert.compare_outputs(a, b, tokens)
        print(found)
        equal = equal and is_rounding
    print("equal" if equal else "DIFFERENT")
    return 0 if equal else 1


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="megarl convert", description=__doc__, formatter_class=form)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, from_hf in (("hf-to-megatron", True), ("megatron-to-hf", False)):
        command = commands.add_parser(name)
        command.add_argument("source", metavar="SRC", type=Path)
        command.add_argument("target", metavar="DST", type=Path)
        command.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the weights; default: as they are")
        command.add_argument("--overwrite", action="store_true", help="replace DST where it exists")
        command.set_defaults(run=run_convert, from_hf=from_hf, role=None, verify=True)
        if from_hf:
            roles = ["policy", "critic"]
            command.add_argument("--role", choices=roles, help="default: critic where there is a value head")
        else:
            add_no_verify(command)
    verify = commands.add_parser("verify")
    verify.add_argument("a", metavar="A", type=Path)
    verify.add_argument("b", metavar="B", type=Path)
    verify.add_argument("--text", help="also compare the logits of this text, or a critic's values")
    verify.set_defaults(run=run_verify)
    info = commands.add_parser("info")
    info.add_argument("directory", metavar="DIR", type=Path)
    info.set_defaults(run=run_info)
    for command in (verify, info):
        add_no_verify(command)
    return parser.parse_args(argv)


def add_no_verify(command: argparse.ArgumentParser) -> None:
    command.add_argument("--no-verify", dest="verify", action="store_false", help="do not check the checksums")


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
    # A model may be larger than a GPU: it is converted in the memory of the host.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.exit(run(sys.argv[1:]))
