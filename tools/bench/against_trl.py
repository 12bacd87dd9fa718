"""Samples per second of TRL's GRPO and of megarl's on the same SmolLM2-135M, taking turns in one run.

Run: python tools/bench/against_trl.py [--cells 4x8x32-float32 ...] [--iterations N] [--model DIR] [--table]

A cell is prompts x responses x tokens and a precision; default: 4x8x32 and 16x16x128, each in float32 and bfloat16.
Both sides have the same checkpoint, prompts, group size, one optimizer step per iteration over micro-batches of equally
many rows, a learning rate near 0, no KL and no reference, all cores, and responses that are all of full length (end of
sequence ignored or impossible). megarl's samples are held to its usual checks, weight sync and its verification
included. TRL generates with transformers, keeps its activations (gradient_checkpointing=False, in its favour), and in
bfloat16 has neither float32 weights nor float32 optimizer states (in its favour). An iteration of one side runs while
the other one waits; the first of each does not count where there are more. TRL runs in an environment of its own under
$MEGARL_CACHE/trl, made where it is missing with the pins of tools/install, the same torch among them. A cell's numbers
are a file under --out, and docs/results/against-trl.md is made of all that are there; --table does only that. The ratio
is that of the slowest cell of the run.
"""

import argparse
import contextlib
import json
import os
import re
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from trl_table import GOAL, PHASES, compute_ratio, format_row, write_page

from megarl.config.load import load_config
from megarl.models.checkpoint import build_once, build_smollm2_checkpoint, default_cache_dir
from megarl.report.metrics import load_metrics
from megarl.report.report import build_report
from megarl.report.starts import find_hardware
from megarl.run.inputs import load_inputs
from megarl.run.job import open_components, open_resources
from megarl.trainer import Trainer
from megarl.types import Prompt

ROOT = Path(__file__).resolve().parents[2]
INSTALL = ROOT / "tools" / "install"
TRL = "1.16.0"
CELLS = tuple(f"{size}-{dtype}" for size in ("4x8x32", "16x16x128") for dtype in ("float32", "bfloat16"))
ROWS_PER_MICROBATCH = 8
LEARNING_RATE = 1e-7
SMALL = 64
"""Responses of an iteration up to which by default five are measured after a warm-up, beyond it two without one"""
DEADLINE_S = 3600.0


@dataclass(frozen=True)
class Cell:
    num_prompts: int
    num_responses: int
    response_length: int
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.num_prompts}x{self.num_responses}x{self.response_length}-{self.dtype}"

    @property
    def num_samples(self) -> int:
        return self.num_prompts * self.num_responses


def parse_cell(text: str) -> Cell:
    """Raises ArgumentTypeError."""
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)-(float32|bfloat16)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"found {text!r}; it must be like {CELLS[0]}")
    cell = Cell(int(found[1]), int(found[2]), int(found[3]), found[4])
    if cell.num_samples % ROWS_PER_MICROBATCH or cell.num_responses < 2:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; groups have two responses or more, {ROWS_PER_MICROBATCH}n all"
        )
    return cell


def install_trl(directory: Path) -> None:
    """TRL with the pins of tools/install, torch from where the installer takes it. Ends the program on an error."""
    sys.path.insert(0, str(INSTALL))
    import install

    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True, timeout=DEADLINE_S)
    install.PYTHON, install.STAMPS = directory / "bin" / "python", directory
    install.install_torch("cpu", install.read_pins(INSTALL / "cpu.lock")["torch"])
    constraints = [f"--constraint={INSTALL / name}" for name in ("cpu.lock", "cpu-smollm2.lock")]
    install.pip("install", *constraints, f"trl=={TRL}", "numpy")


def find_trl_python() -> Path:
    torch = metadata.version("torch").partition("+")[0]
    name = f"{TRL}-torch{torch}-python{sys.version_info.major}.{sys.version_info.minor}"
    return build_once(default_cache_dir() / "trl" / name, install_trl) / "bin" / "python"


class TrlRun:
    """TRL's process, which computes an iteration when it is told to."""

    def __init__(self, spec: Mapping[str, Any], directory: Path, log: Path):
        self.log = log
        file = directory / "spec.json"
        file.write_text(json.dumps(spec))
        environment = {**os.environ, "OMP_NUM_THREADS": str(spec["threads"]), "HF_HUB_OFFLINE": "1"}
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [str(find_trl_python()), str(Path(__file__).with_name("trl_grpo.py")), str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                bufsize=0,
            )
        self.facts = self._read("start")

    def step(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        return self._read("iteration")

    def _read(self, what: str) -> dict[str, Any]:
        """The next line of TRL's process. Raises RuntimeError with the end of its log."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            why = "ended" if ready else f"did not answer within {DEADLINE_S:g} s"
            tail = "\n".join(self.log.read_text().splitlines()[-20:])
            raise RuntimeError(f"{what} of TRL: its process {why}:\n{tail}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)


def list_overrides(cell: Cell, prompts: Path, args: argparse.Namespace) -> list[str]:
    longest = args.prompt_length + cell.response_length
    return [
        "model=smollm2_135m",
        "model.source=path",
        f"model.path={args.model}",
        "data=jsonl",
        f"data.path={prompts}",
        "data.num_heldout=1",
        f"data.prompt_length={args.prompt_length}",
        "data.system=''",
        "reward=letter_count",
        "algo=grpo",
        "algo.kl.in_loss=false",
        f"policy.dtype={cell.dtype}",
        f"policy.optimizer.lr={LEARNING_RATE}",
        f"rollout.dtype={cell.dtype}",
        f"rollout.response_length={cell.response_length}",
        f"rollout.kv_cache_tokens={cell.num_samples * (longest + 1)}",
        f"rollout.max_running_requests={cell.num_samples}",
        f"rollout.num_threads={args.threads}",
        f"rollout.request_deadline_s={DEADLINE_S}",
        f"cluster.cpu_threads_per_worker={args.threads}",
        f"train.prompts_per_iteration={cell.num_prompts}",
        f"train.responses_per_prompt={cell.num_responses}",
        "train.num_minibatches=1",
        f"train.tokens_per_microbatch={ROWS_PER_MICROBATCH * longest}",
        "train.num_iterations=1000",
        "train.eval_every=1000",
        "train.num_eval_prompts=1",
        "checkpoint.save_every=null",
        "logger.terminal=false",
        "logger.tensorboard=false",
    ]


def write_prompts(file: Path, num_prompts: int) -> None:
    """One more, which is held out."""
    tasks = [f"Write a short story about a village with {10 + n} houses and a river." for n in range(num_prompts + 1)]
    file.write_text("".join(json.dumps({"question": task, "answer": "e40"}) + "\n" for task in tasks))


def fix_lengths(engine: Any) -> None:
    """Every response has all its tokens."""
    build = engine._build_params
    engine._build_params = lambda request: build(request) | {"ignore_eos": True}


@contextlib.contextmanager
def opening(cell: Cell, args: argparse.Namespace, directory: Path) -> Iterator[tuple[Trainer, Sequence[Prompt]]]:
    """megarl's run, before its first iteration, and the prompts of each."""
    write_prompts(directory / "prompts.jsonl", cell.num_prompts)
    config = load_config(list_overrides(cell, directory / "prompts.jsonl", args))
    inputs = load_inputs(config)
    with (
        contextlib.closing(build_report(config.logger, directory, config.train.num_iterations)) as report,
        open_resources(config, inputs, directory / "logs") as resources,
        open_components(config, inputs, resources, directory, report) as components,
    ):
        fix_lengths(components.engine)
        trainer = Trainer(config, components)
        trainer.publish_and_evaluate()
        yield trainer, inputs.data.train


def run_ours(trainer: Trainer, cell: Cell, directory: Path) -> dict[str, float]:
    """One iteration: its seconds and those of its phases."""
    start = time.perf_counter()
    trainer.train(trainer.iteration + 1)
    trainer.publish_and_evaluate()
    seconds = time.perf_counter() - start
    line = load_metrics(directory / "metrics.jsonl")[-1]
    if line["length/mean"] != cell.response_length:
        raise RuntimeError(f"responses of {line['length/mean']:g} tokens found; all should have {cell.response_length}")
    return {"seconds": seconds, **{phase: line[f"time/{phase}"] for phase in PHASES}}


def measure(cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """The cell's numbers: seconds of each iteration that counts, of both sides."""
    is_small = cell.num_samples <= SMALL
    num_iterations = args.iterations or (5 if is_small else 2)
    warm_up = args.warm_up if args.warm_up is not None else int(is_small)
    iterations = []
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        directory = Path(scratch)
        trainer, prompts = stack.enter_context(opening(cell, args, directory))
        spec = {
            "model": str(args.model),
            "prompts": [prompt.text for prompt in prompts],
            "prompt_ids": [list(prompt.token_ids) for prompt in prompts],
            "num_responses": cell.num_responses,
            "response_length": cell.response_length,
            "rows_per_microbatch": ROWS_PER_MICROBATCH,
            "dtype": cell.dtype,
            "threads": args.threads,
            "learning_rate": LEARNING_RATE,
            "num_iterations": num_iterations + warm_up + 1,
        }
        trl = stack.enter_context(contextlib.closing(TrlRun(spec, directory, directory / "trl.log")))
        for number in range(num_iterations + warm_up):
            theirs, ours = trl.step(), run_ours(trainer, cell, directory)
            if theirs["lengths"] != [cell.response_length] * 2:
                raise RuntimeError(f"TRL's responses have {theirs['lengths']} tokens; {cell.response_length} are right")
            print(f"{cell.name}: TRL {theirs['seconds']:.1f} s, megarl {ours['seconds']:.1f} s", flush=True)
            if number >= warm_up:
                iterations.append({"trl": theirs, "megarl": ours})
    return {
        **asdict(cell),
        "prompt_tokens": statistics.fmean(len(prompt.token_ids) for prompt in prompts),
        "threads": args.threads,
        "load_average": os.getloadavg()[2],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "hardware": find_hardware(),
        "megarl": {name: metadata.version(name) for name in ("torch", "megatron-core", "sglang", "ray")},
        "trl": trl.facts,
        "iterations": iterations,
    }


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=parse_cell, nargs="+", default=[parse_cell(name) for name in CELLS])
    parser.add_argument("--iterations", type=int, help="measured ones of each side; default: 5, in large cells 2")
    parser.add_argument("--warm-up", type=int, help="iterations before them; default: 1, in large cells 0")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    parser.add_argument("--model", type=Path, help="a checkpoint of SmolLM2-135M; default: that of EXTRAS=smollm2")
    parser.add_argument("--prompt-length", type=int, default=64, help="maximum tokens of a prompt")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(""))
    parser.add_argument("--table", action="store_true", help="only write the page from the finished cells")
    return parser.parse_args()


def main() -> None:
    args = read_arguments()
    ratios = []
    if not args.table:
        args.model = (args.model or build_smollm2_checkpoint(default_cache_dir())).resolve()
        args.out.mkdir(parents=True, exist_ok=True)
        for cell in args.cells:
            result = measure(cell, args)
            (args.out / f"{cell.name}.json").write_text(json.dumps(result, indent=1) + "\n")
            print(format_row(result), flush=True)
            ratios.append(compute_ratio(result))
    write_page(args.out, CELLS)
    if ratios:
        print(f"ratio: {min(ratios):.2f} goal: {GOAL:g}")


if __name__ == "__main__":
    main()
