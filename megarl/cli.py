"""The console script `megarl COMMAND ...`: the same as `python -m` with the command's module."""

import runpy
import sys
from collections.abc import Sequence

import megarl

COMMANDS = {
    "train": ("megarl.train", "train with one composed configuration, or a sweep (-m)"),
    "evaluate": ("megarl.evaluate", "score a model on whole sets of problems"),
    "new": ("megarl.new", "a folder with a task of your own: data, reward, configuration"),
    "doctor": ("megarl.plan.doctor", "can this configuration run on this machine?"),
    "plan": ("megarl.plan.command", "memory and time of a configuration on a cluster"),
    "report": ("megarl.tools.report", "the page of a run"),
    "convert": ("megarl.tools.convert_checkpoint", "checkpoints between Megatron-Core and Hugging Face"),
    "serve": ("megarl.serve", "an SGLang server for reward=judge and reward=reward_model"),
}
"""The module and one line about each"""
RENAMED = dict.fromkeys(("pretrain-value", "pretrain_value"), "megarl train train.num_iterations=0")
"""What takes the place of a command that there is no more"""
EXIT_USAGE = 2


def main() -> None:
    """Run the command that sys.argv names. Ends the process with code 2 for a name that is none."""
    if not sys.argv[1:] or sys.argv[1] in ("-h", "--help"):
        print(_describe())
        return
    name = sys.argv[1]
    if name == "--version":
        print(f"megarl {megarl.__version__}")
        return
    if name not in COMMANDS:
        print(f"error: {name}: no such command; {_hint(name)}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    sys.argv[:2] = [f"megarl {name}"]
    # As `python -m` does it: processes that a command starts find its module again by its name.
    runpy.run_module(COMMANDS[name][0], run_name="__main__", alter_sys=True)


def _describe() -> str:
    lines: Sequence[str] = [f"  {name:15}{about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(["usage: megarl COMMAND [key=value] ... | --help | --version", "", *lines])


def _hint(name: str) -> str:
    if name in RENAMED:
        return f"{RENAMED[name]} does it"
    known = ", ".join(COMMANDS)
    return f"megarl train {name} ..." if "=" in name else f"the commands are {known}"


if __name__ == "__main__":
    main()
