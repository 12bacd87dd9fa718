"""`megarl serve MODEL`: one SGLang server for reward=judge or reward=reward_model, until Ctrl-C."""

import argparse
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.config.schema.roles import Dtype
from megarl.config.schema.run import RolloutConfig
from megarl.cpu.serving import CpuServing
from megarl.interfaces import DeadlineError
from megarl.models.checkpoint import find_checkpoint
from megarl.rollout.server import WEIGHT_LOADER, ServerError, SGLangServer, find_serving, write_private

LEFT_OUT = (["--skip-tokenizer-init"], ["--custom-weight-loader", WEIGHT_LOADER])
"""Words of a rollout server's command line: this one takes messages, and its weights stay what they are"""
KEY = "MEGARL_SERVE_KEY"
"""The environment variable with the key that callers must send"""


def main() -> None:
    """Start the server, say where it is and wait for a signal. Exit status 2 for bad arguments, 1 for a lost server."""
    arguments = read_arguments(sys.argv[1:])
    folder = Path(tempfile.mkdtemp(prefix="megarl-serve-"))  # which this user alone can read
    try:
        server = build_server(arguments, folder)
    except ConfigError as error:
        sys.exit("\n".join(f"error: {problem}" for problem in error.problems))
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    try:
        server.start()
        print(f"starting {arguments.model}; log: {server.log_file}", flush=True)
        server.wait_healthy(600.0)
        print(f"ready: reward.url={server.url} reward.api_key_env={KEY}", flush=True)
        if KEY not in os.environ:
            print(f'the key: export {KEY}="$(cat {write_private(folder / "key", server.api_key)})"', flush=True)
        while not stopped.wait(1.0):
            server.check_alive()
    except (ServerError, DeadlineError) as error:
        if not stopped.is_set():
            sys.exit(f"error: {error}")
    finally:
        server.stop()


def read_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megarl serve", description=__doc__)
    parser.add_argument("model", help="checkpoint directory, or the name of a model in the Hugging Face cache")
    parser.add_argument("--host", default="127.0.0.1", help=f"callers need the key in {KEY}; without one it makes one")
    parser.add_argument("--port", type=int, default=30000, help="0 picks a free one")
    parser.add_argument("--dtype", choices=[dtype.value for dtype in Dtype], default="bfloat16")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of the server")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; without effect on a GPU")
    parser.add_argument("--kv-cache-tokens", type=int, help=f"default on a CPU {CpuServing.default_tokens}")
    parser.add_argument("--max-running-requests", type=int, default=128)
    parser.add_argument("--log", type=Path, help="file for the server's output; default: a new one in TMPDIR")
    return parser.parse_args(words)


def build_server(arguments: argparse.Namespace, folder: Path) -> SGLangServer:
    """The server of these arguments, not yet started. Raises ConfigError."""
    tokens = arguments.kv_cache_tokens
    config = RolloutConfig(
        dtype=Dtype(arguments.dtype),
        tp=arguments.tp,
        num_threads=arguments.threads,
        max_running_requests=arguments.max_running_requests,
        kv_cache_tokens=tokens if tokens is not None else find_serving().default_tokens,
    )
    log, port, key = arguments.log or folder / "server.log", arguments.port or None, os.environ.get(KEY)
    checkpoint = find_checkpoint(arguments.model, "MODEL")
    server = SGLangServer(config, checkpoint, log_file=log, seed=1, host=arguments.host, port=port, api_key=key)
    for words in LEFT_OUT:
        start = server._command.index(words[0])
        del server._command[start : start + len(words)]
    return server


if __name__ == "__main__":
    main()
