"""The console script `megarl COMMAND ...`, which is also `python -m megarl.cli COMMAND ...`. What a command needs is
imported once it is chosen.
"""

import argparse
import contextlib
import os
import runpy
import shlex
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import megarl

if TYPE_CHECKING:
    from megarl.rollout.server import SGLangServer

COMMANDS = {
    "train": ("megarl.train", "train with one composed configuration, or a sweep (-m)"),
    "evaluate": ("", "score a model on whole sets of problems"),
    "new": ("", "a folder with a task of your own: data, reward, configuration"),
    "data": ("megarl.run.preview", "what a run will read: prompts, lengths, repeats, answers"),
    "doctor": ("megarl.plan.doctor", "can this configuration run on this machine?"),
    "plan": ("megarl.plan.command", "memory and time of a configuration on a cluster"),
    "report": ("megarl.tools.report", "the report of a run"),
    "variance": ("megarl.tools.variance", "variance of the policy gradient under each baseline"),
    "check-gpu": ("megarl.tools.check_gpu", "does megarl train on this machine's GPUs? one page and a bundle of logs"),
    "convert": ("megarl.tools.convert_checkpoint", "checkpoints between Megatron-Core and Hugging Face"),
    "serve": ("", "an SGLang server for reward=judge and reward=reward_model"),
}
"""The module, empty for one of this file or of run/command.py, and one line about each"""
EXAMPLE = Path(__file__).resolve().parent / "examples" / "own_task"
EXIT_USAGE = 2


def main() -> None:
    """Run the command that sys.argv names. Ends the process with code 2 for a name that is none."""
    name, words = (sys.argv[1], sys.argv[2:]) if sys.argv[1:] else ("--help", [])
    if name in ("-h", "--help"):
        print("usage: megarl COMMAND [key=value] ... | --help | --version\n")
        print("\n".join(f"  {name:15}{about}" for name, (_, about) in COMMANDS.items()))
    elif name == "--version":
        print(f"megarl {megarl.__version__}")
    elif name == "new":
        create_task(words)
    elif name == "serve":
        serve(words)
    elif name == "evaluate":
        from megarl.run.command import evaluate

        sys.argv[:2] = ["megarl evaluate"]
        evaluate()
    elif name in COMMANDS:
        sys.argv[:2] = [f"megarl {name}"]
        # As `python -m` does it: processes that a command starts find its module again by its name.
        runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=True)
    else:
        hint = f"megarl train {name} ..." if "=" in name else f"the commands are {', '.join(COMMANDS)}"
        _end(f"{name}: no such command; {hint}")


def create_task(words: list[str]) -> None:
    """`megarl new DIR`: copy examples/own_task, which trains as it is, into a new folder."""
    if len(words) != 1 or words[0].startswith("-"):
        print("usage: megarl new DIR: a folder with a task of your own, which trains as it is")
        sys.exit(0 if words in (["-h"], ["--help"]) else EXIT_USAGE)
    directory = Path(words[0])
    try:
        shutil.copytree(EXAMPLE, directory, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    except OSError as error:
        _end(f"new: {directory} cannot be made: {error}")
    print(f"{directory}: README.md says what to change")
    print(f"next: cd {shlex.quote(str(directory))} && megarl train --config-dir . experiment=own_task")


def _end(problem: str) -> None:
    print(f"error: {problem}", file=sys.stderr)
    sys.exit(EXIT_USAGE)


KEY = "MEGARL_SERVE_KEY"
"""The environment variable with the key that callers of `megarl serve` must send"""


def serve(words: Sequence[str]) -> None:
    """`megarl serve MODEL`: one SGLang server for reward=judge or reward=reward_model, until Ctrl-C.

    Exit status 2 for bad arguments, 1 for what the server cannot do, or where it is lost.
    """
    from megarl.config.errors import ConfigError
    from megarl.files import write_private
    from megarl.interfaces import DeadlineError
    from megarl.rollout.server import ServerError

    folder, stopped = Path(tempfile.mkdtemp(prefix="megarl-serve-")), threading.Event()
    key = folder / "key"  # This user alone can read the folder.
    try:
        server, model = _build_server(words, folder)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
        try:
            server.start()
            print(f"starting {model}; log: {server.log_file}", flush=True)
            server.wait_healthy(600.0)
            print(f"ready: reward.url={server.url} reward.api_key_env={KEY}", flush=True)
            if KEY not in os.environ:
                print(f'the key: export {KEY}="$(cat {write_private(key, server.api_key)})"', flush=True)
            while not stopped.wait(1.0):
                server.check_alive()
        finally:
            server.stop()
    except ConfigError as error:
        _end("\nerror: ".join(error.problems))
    except ServerError as error:
        if not stopped.is_set():
            sys.exit(f"error: {error}")
    except DeadlineError as error:
        sys.exit(f"error: {error}")
    finally:
        key.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # The log of a server that was started stays in it.
            folder.rmdir()


def _build_server(words: Sequence[str], folder: Path) -> "tuple[SGLangServer, str]":
    """The server of this command line, not yet started, and its model. Raises ConfigError."""
    from megarl.config.schema.roles import Dtype
    from megarl.config.schema.root import RolloutConfig
    from megarl.cpu.process import CpuServing
    from megarl.models.checkpoint import find_checkpoint
    from megarl.rollout.server import SGLangServer, find_serving

    about = "One SGLang server for reward=judge or reward=reward_model, until Ctrl-C."
    parser = argparse.ArgumentParser(prog="megarl serve", description=about)
    parser.add_argument("model", help="checkpoint directory, or the name of a model in the Hugging Face cache")
    parser.add_argument("--host", default="127.0.0.1", help=f"callers need the key in {KEY}; without one it makes one")
    parser.add_argument("--port", type=int, default=30000, help="0 picks a free one")
    parser.add_argument("--dtype", choices=[dtype.value for dtype in Dtype], default="bfloat16")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of the server")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; without effect on a GPU")
    parser.add_argument("--kv-cache-tokens", type=int, help=f"default on a CPU {CpuServing.default_tokens}")
    parser.add_argument("--max-running-requests", type=int, default=128)
    parser.add_argument("--log", type=Path, help="file for the server's output; default: a new one in TMPDIR")
    given = parser.parse_args(words)
    tokens = given.kv_cache_tokens
    config = RolloutConfig(
        dtype=Dtype(given.dtype),
        tp=given.tp,
        num_threads=given.threads,
        max_running_requests=given.max_running_requests,
        kv_cache_tokens=tokens if tokens is not None else find_serving().default_tokens,
    )
    log, port, key = given.log or folder / "server.log", given.port or None, os.environ.get(KEY)
    own = {"host": given.host, "port": port, "api_key": key, "is_policy": False}
    return SGLangServer(config, find_checkpoint(given.model, "MODEL"), log_file=log, seed=1, **own), given.model


if __name__ == "__main__":
    main()
