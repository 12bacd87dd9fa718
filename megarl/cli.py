"""The console script `megarl COMMAND ...`: the same as `python -m` with the command's module, and `megarl new DIR`."""

import runpy
import shlex
import shutil
import sys
from pathlib import Path

import megarl

COMMANDS = {
    "train": ("megarl.train", "train with one composed configuration, or a sweep (-m)"),
    "evaluate": ("megarl.evaluate", "score a model on whole sets of problems"),
    "new": ("megarl.cli", "a folder with a task of your own: data, reward, configuration"),
    "doctor": ("megarl.plan.doctor", "can this configuration run on this machine?"),
    "plan": ("megarl.plan.command", "memory and time of a configuration on a cluster"),
    "report": ("megarl.tools.report", "the page of a run"),
    "convert": ("megarl.tools.convert_checkpoint", "checkpoints between Megatron-Core and Hugging Face"),
    "serve": ("megarl.serve", "an SGLang server for reward=judge and reward=reward_model"),
}
"""The module and one line about each"""
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


if __name__ == "__main__":
    main()
