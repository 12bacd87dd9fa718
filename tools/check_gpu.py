"""Does megarl train on this machine's GPUs? One table, a verdict a line, JSON and a bundle of logs beside it.

    megarl check-gpu [--device cpu|cuda] [--only NAME,...] [--out FILE.json] [key=value ...]

In an order in which the first failure is the most telling. Each check runs in a process of its own with a deadline: one
that crashes or runs out of memory is a line in the table. All take 40 minutes at most, on one GPU 15: what has no time
left then is skipped. FILE.tar.gz has what to send where something fails: the JSON and all logs.

  ranks           real processes of two roles on all GPUs, together and apart: their GPUs, order and a step of each
  float32         the update of a small model on this device against the CPU's, both in float32
  bfloat16        the same in bfloat16, against the CPU's in float32
  servers         log-probs of a server's greedy, sampled and long responses and of its prefill by the trainer; memory
                  that it gives back and takes again; needs SGLang
  layouts         log-probs and gradient of tp, sp, pp, vpp, cp, ep on all GPUs against one process
  checkpoint      a state of all GPUs saved before the first step and after one, loaded into new processes
  fp8             the update with FP8 products against bfloat16, saved and loaded; needs Transformer Engine and a GPU
                  with FP8
  sync            two iterations by each transport: bytes beside the fewest possible, seconds of each step
  update          a large model at its longest sequences, all activations recomputed: memory of each phase against the
                  planner's, model FLOPs utilization (MFU) of the update
  update_kept     the same with all activations kept; skipped where the plan exceeds the GPU
  run             ten iterations of PPO with a random model of Qwen3-0.6B's layers: a reward that must rise

A check that could not run is skipped, with the reason, and never holds. What has no bound (the speed of a GPU whose
peak is not known) is skipped too, with its number.

key=value are those of python -m megarl.train. Of them matter here:

  model=..., model.path=..., model.random=...   sizes of the large model, whose weights are random here and whose files
                  need not be there (default: 1.4 billion weights, Qwen3-1.7B with 22 of its 28 layers; with --device
                  cpu a tiny one). The small one has layers of the same family. A model that one GPU cannot train is
                  skipped with its plan
  policy.dtype, critic.dtype, rollout.dtype     bfloat16 by default, float32 with --device cpu
  data.prompt_length, rollout.response_length, train.tokens_per_microbatch   1,024, 15,360 and 16,384 tokens by default;
                  those of a preset of model= do not count
  policy.recompute_*, model.megatron, rollout.sync_bucket_mb, rollout.temperature, rollout.sglang; policy.fp8=hybrid
                  with policy.fp8_recipe=... for another recipe of fp8
  cluster.hardware or cluster=...   the peak for the MFU, where the GPU's name is not known

The runs of sync and run have settings of their own.

Exit code: 0 nothing fails, 1 something fails or nothing could be checked, 2 no GPU or a wrong argument.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from megarl.config.errors import ConfigError
from megarl.tools.gpu.lines import Line, conclude, count_verdicts, fail, make_table, read_line, skip, write_json
from megarl.tools.gpu.machine import Machine, find_machine
from megarl.tools.gpu.setting import CPU, CUDA, Setting

EXIT_REFUSED = 2
WIDTH = 150
LOG_TAIL_LINES = 30
LEAST_FOR_FP8 = (8, 9)
LEAST_LEFT_S = 60.0


@dataclass(frozen=True)
class Check:
    name: str
    module: str
    """The module of tools/gpu with the function check_NAME, a generator of lines"""
    deadline_s: float
    find_reason: Callable[[Machine, str], str | None] = lambda machine, device: None
    """Why it cannot run here; None: it can"""


@dataclass(frozen=True)
class Outcome:
    lines: tuple[Line, ...]
    seconds: float
    log: str = ""
    """The end of what the process wrote, where something fails"""


def explain_no_fp8(machine: Machine, device: str) -> str | None:
    if device != CUDA:
        return "needs a GPU"
    if machine.capability is not None and machine.capability < LEAST_FOR_FP8:
        return f"GPU without FP8: compute capability {'.'.join(map(str, machine.capability))}, 8.9 or more is needed"
    return machine.problems.get("transformer_engine")


CHECKS = (
    Check("ranks", "ranks", 300),
    Check("float32", "training", 300),
    Check("bfloat16", "training", 300),
    Check("servers", "serving", 600, lambda machine, device: machine.problems.get("sglang")),
    Check("layouts", "ranks", 900),
    Check("checkpoint", "ranks", 420),
    Check("fp8", "training", 600, explain_no_fp8),
    Check("sync", "runs", 600, lambda machine, device: machine.problems.get("sglang")),
    Check("update", "sizes", 300),
    Check("update_kept", "sizes", 300),
    Check("run", "runs", 600, lambda machine, device: machine.problems.get("sglang")),
)
LIMITS_S = {True: 40 * 60.0, False: 15 * 60.0}
"""Of all checks, on several GPUs or on one"""
BUNDLED = {".log", ".jsonl", ".json", ".yaml"}


def run_check(check: Check, setting: Setting, command: Sequence[str], environment: Mapping[str, str]) -> Outcome:
    """Run the command, which writes the check's lines, and add one for a bad end."""
    start = time.monotonic()
    log, found = setting.scratch / f"{check.name}.log", setting.scratch / f"{check.name}.jsonl"
    with open(log, "wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )
        try:
            status: int | None = process.wait(check.deadline_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            # Its own processes, too, however it ended.
            end_group(process)
    lines = [read_line(json.loads(text)) for text in found.read_text().splitlines()] if found.exists() else []
    tail = log.read_text(errors="replace").strip().splitlines()[-LOG_TAIL_LINES:]
    if status != 0:
        lines.append(fail(check.name, "ends", describe_end(status, check.deadline_s, tail)))
    elif not lines:
        lines.append(fail(check.name, "ends", "ended without a line"))
    return Outcome(tuple(lines), time.monotonic() - start, "\n".join(tail) if status != 0 else "")


def end_group(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def describe_end(status: int | None, deadline_s: float, tail: Sequence[str]) -> str:
    """status: exit status of the process, negative of a signal; None: it was killed at the deadline."""
    last = tail[-1].strip() if tail else "without a message"
    if status is None:
        return f"not ended within {deadline_s:g} s; killed"
    if status < 0:
        killed = " (the machine's memory may be full)" if status == -signal.SIGKILL else ""
        return f"ended by signal {signal.Signals(-status).name}{killed}: {last}"
    return f"ended with status {status}: {last}"


def run_all(
    checks: Sequence[Check], machine: Machine, setting: Setting, environment: Mapping[str, str]
) -> Iterator[tuple[Check, Outcome]]:
    end = time.monotonic() + LIMITS_S[machine.num_gpus > 1]
    for check in checks:
        reason = check.find_reason(machine, setting.device)
        # On a CPU, where nothing is measured, a busy machine may take its time.
        left = end - time.monotonic() if setting.device == CUDA else check.deadline_s
        if reason is None and left < LEAST_LEFT_S:
            reason = f"no time left of {LIMITS_S[machine.num_gpus > 1] / 60:g} minutes; --only {check.name}"
        if reason is not None:
            yield check, Outcome((skip(check.name, "all of it", reason),), 0.0)
            continue
        command = [sys.executable, __file__, "--device", setting.device]
        command += ["--alone", check.name, str(setting.scratch), *setting.overrides]
        yield check, run_check(replace(check, deadline_s=min(check.deadline_s, left)), setting, command, environment)


def run_alone(check: Check, setting: Setting) -> None:
    """In the check's own process: write each line as soon as it is known."""
    found: Iterator[Line] = getattr(import_module(f"megarl.tools.gpu.{check.module}"), f"check_{check.name}")(setting)
    with open(setting.scratch / f"{check.name}.jsonl", "w") as file:
        for line in found:
            file.write(json.dumps(asdict(line)) + "\n")
            file.flush()


def choose(only: str | None) -> list[Check]:
    """Raises ConfigError for a name that no check has."""
    names = [check.name for check in CHECKS]
    chosen = names if only is None else only.split(",")
    wrong = [name for name in chosen if name not in names]
    if wrong:
        raise ConfigError([f"--only: found {', '.join(map(repr, wrong))}; it must be one of {', '.join(names)}"])
    return [check for check in CHECKS if check.name in chosen]


def choose_device(asked: str | None, machine: Machine) -> str:
    """Raises ConfigError where there is no GPU and the CPU was not asked for."""
    if asked != CPU and machine.gpu is None:
        cuda = f"torch {machine.versions['torch']} is built for CUDA {machine.cuda}" if machine.cuda else "a CPU build"
        raise ConfigError(
            [
                f"--device: torch sees no GPU ({cuda}, driver {machine.driver or 'none'}); --device cpu checks the tool"
                " on a CPU"
            ]
        )
    return asked or CUDA


def check_machine(args: argparse.Namespace, scratch: Path) -> int:
    """Print the table, write the JSON; the exit code. Raises ConfigError."""
    from rich.console import Console

    checks = choose(args.only)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if args.device == CPU else {}
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", **hidden}
    try:
        machine = find_machine(environment)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        raise ConfigError([str(error)]) from error
    setting = Setting(choose_device(args.device, machine), tuple(args.overrides), scratch)
    model = setting.large
    console = Console(width=WIDTH, highlight=False)
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items() if version)
    console.print(
        f"{machine.gpu or 'CPU'}, driver {machine.driver or 'none'}; Python {machine.python}, {versions}",
        soft_wrap=True,
    )
    lines: list[Line] = []
    seconds: dict[str, float] = {}
    logs: dict[str, str] = {}
    for check, outcome in run_all(checks, machine, setting, environment):
        lines += outcome.lines
        seconds[check.name] = round(outcome.seconds, 1)
        if outcome.log:
            logs[check.name] = outcome.log
        print(f"{check.name}: {count_verdicts(outcome.lines)}; {outcome.seconds:.0f} s", file=sys.stderr, flush=True)
    console.print(make_table(lines))
    verdict, code = conclude(lines)
    if setting.device == CPU:
        console.print("with --device cpu: this checks the tool, and says nothing of a GPU")
    bundle = args.out.with_suffix(".tar.gz")
    console.print(f"{verdict}; {args.out}; to send: {bundle}", soft_wrap=True)
    content: dict[str, Any] = {"device": setting.device, "machine": asdict(machine), "model": model}
    content |= {"overrides": args.overrides, "seconds": seconds, "logs": logs}
    write_json(args.out, content, lines)
    with tarfile.open(bundle, "w:gz") as tar:
        for file in [args.out, *sorted(path for path in scratch.rglob("*") if path.suffix in BUNDLED)]:
            tar.add(file, file.name if file == args.out else str(file.relative_to(scratch)), recursive=False)
    return code


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=[CPU, CUDA], help="default: cuda")
    parser.add_argument("--only", metavar="NAME,...", help="these checks alone")
    parser.add_argument("--out", type=Path, default=Path("check_gpu.json"), help="default: check_gpu.json")
    parser.add_argument("--alone", nargs=2, metavar=("NAME", "DIRECTORY"), help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for megarl.train")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    args = parse_arguments(arguments)
    warnings.simplefilter("ignore")
    try:
        if args.alone is not None:
            (check,) = choose(args.alone[0])
            run_alone(check, Setting(args.device, tuple(args.overrides), Path(args.alone[1])))
            return 0
        with tempfile.TemporaryDirectory(prefix="megarl-check-gpu-") as scratch:
            return check_machine(args, Path(scratch))
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return EXIT_REFUSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
