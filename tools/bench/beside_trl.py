"""Samples per second of TRL's GRPO and of megarl's on the same SmolLM2-135M, iterations of the two in turns.

A cell is prompts x responses x tokens and a precision. Both sides have the same checkpoint, prompts, group size, one
optimizer step per iteration over micro-batches of equally many rows, a learning rate near 0, no KL and no reference,
all cores, and responses that are all of full length (end of sequence ignored or impossible). megarl's samples are held
to its usual checks, weight sync and its verification included. TRL generates with transformers, keeps its activations
(gradient_checkpointing=False, in its favour), and in bfloat16 has neither float32 weights nor float32 optimizer states
(in its favour). TRL runs in an environment of its own under $MEGARL_CACHE/trl, made where it is missing with the pins
of tools/install, the same torch among them. The ratio is TRL's seconds over megarl's, the median of neighbours.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from speed import Result, describe_range, find_medians, take_turns

from megarl.config.load import load_config
from megarl.models.checkpoint import build_once, build_smollm2_checkpoint, default_cache_dir
from megarl.report.record import load_metrics
from megarl.report.report import build_report
from megarl.run.inputs import load_inputs
from megarl.run.job import open_components, open_resources
from megarl.trainer import Trainer
from megarl.types import Prompt

INSTALL = Path(__file__).resolve().parents[1] / "install"
TRL = "1.16.0"
ROWS_PER_MICROBATCH = 8
LEARNING_RATE = 1e-7
PROMPT_LENGTH = 64
DEADLINE_S = 3600.0
GOAL = 2.0
PHASES = ("rollout", "experience", "update", "sync")


@dataclass(frozen=True)
class Cell:
    num_prompts: int
    num_responses: int
    response_length: int
    dtype: str

    @property
    def num_samples(self) -> int:
        return self.num_prompts * self.num_responses


def parse_cell(text: str) -> Cell:
    """Raises ArgumentTypeError."""
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)-(float32|bfloat16)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"found {text!r}; it must be like 4x8x32-float32")
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

    def __init__(self, spec: Mapping[str, Any], directory: Path, num_tokens: int):
        self.log, self.num_tokens = directory / "trl.log", num_tokens
        file = directory / "spec.json"
        file.write_text(json.dumps(spec))
        environment = {**os.environ, "OMP_NUM_THREADS": str(spec["threads"]), "HF_HUB_OFFLINE": "1"}
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [str(find_trl_python()), str(Path(__file__).with_name("trl_grpo.py")), str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                bufsize=0,
            )
        self.versions = self._read("start")["versions"]

    def step(self) -> dict[str, float]:
        """One iteration: its seconds and those of generation and training."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        found = self._read("iteration")
        if (lengths := found.pop("lengths")) != [self.num_tokens] * 2:
            raise RuntimeError(f"TRL's responses have {lengths} tokens; {self.num_tokens} are right")
        return found

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
    longest = PROMPT_LENGTH + cell.response_length
    return [
        "model=smollm2_135m",
        "model.source=path",
        f"model.path={args.model}",
        "data=jsonl",
        f"data.path={prompts}",
        "data.num_heldout=1",
        f"data.prompt_length={PROMPT_LENGTH}",
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
        open_resources(config, inputs.checkpoint, directory / "logs") as resources,
        open_components(config, inputs, resources, directory, report) as components,
    ):
        fix_lengths(components.engine)
        trainer = Trainer(config, components)
        trainer.publish_and_evaluate()
        yield trainer, inputs.data.train


def run_ours(trainer: Trainer, cell: Cell, directory: Path) -> dict[str, float]:
    """One iteration: the seconds of its phases."""
    trainer.train(trainer.iteration + 1)
    trainer.publish_and_evaluate()
    line = load_metrics(directory / "metrics.jsonl")[-1]
    if line["length/mean"] != cell.response_length:
        raise RuntimeError(f"responses of {line['length/mean']:g} tokens found; all should have {cell.response_length}")
    return {phase: line[f"time/{phase}"] for phase in PHASES}


def find_costly(trl: Mapping[str, float], ours: Mapping[str, float]) -> tuple[str, float]:
    """The phase whose seconds are most beyond the GOAL-th part of TRL's counterpart, and by how many.

    Generation is the counterpart of the rollout, training that of the update; the others have none.
    """
    excess = {
        "rollout": ours["rollout"] - trl["generation"] / GOAL,
        "update": ours["update"] - trl["training"] / GOAL,
        "experience": ours["experience"],
        "sync": ours["sync"],
        "rest": ours["seconds"] - sum(ours[phase] for phase in PHASES),
    }
    name = max(excess, key=lambda phase: excess[phase])
    return name, excess[name]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cell", type=parse_cell, default="4x8x32-float32", help="default: 4x8x32-float32")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    parser.add_argument("--model", type=Path, help="a checkpoint of SmolLM2-135M; default: that of EXTRAS=smollm2")


def run(args: argparse.Namespace) -> Result:
    cell: Cell = args.cell
    args.model = (args.model or build_smollm2_checkpoint(default_cache_dir())).resolve()
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
            "num_iterations": args.repeats + args.warm_up + 1,
        }
        trl = stack.enter_context(contextlib.closing(TrlRun(spec, directory, cell.response_length)))
        ways = {"trl": trl.step, "megarl": lambda: run_ours(trainer, cell, directory)}
        calls = take_turns(ways, args.repeats, args.warm_up)
        versions = ", ".join(f"{name} {version}" for name, version in trl.versions.items())
    medians = {name: find_medians(found) for name, found in calls.items()}
    rows = [
        {
            "": name,
            "samples/s": cell.num_samples / medians[name]["seconds"],
            "seconds": medians[name]["seconds"],
            "least to most": describe_range([call["seconds"] for call in found]),
            **{part: medians[name].get(part, "") for part in ("generation", "training", *PHASES)},
        }
        for name, found in calls.items()
    ]
    pairs = zip(calls["trl"], calls["megarl"], strict=True)
    ratio = statistics.median(theirs["seconds"] / ours["seconds"] for theirs, ours in pairs)
    notes = [f"{cell.num_prompts} x {cell.num_responses} x {cell.response_length}, {cell.dtype}; {versions}"]
    if ratio < GOAL:
        notes.append("below the goal by {}, {:.1f} s too many".format(*find_costly(medians["trl"], medians["megarl"])))
    return Result(rows, ratio, GOAL, notes)
