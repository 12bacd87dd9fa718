"""A command line as Hydra reads it: its own options apart from the overrides."""

import signal
from collections.abc import Sequence

VALUED = ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--experimental-rerun")
"""Hydra's options that take the next word"""
INFO = ("--info", "-i")
INFO_CHOICES = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
COMPLETION = ("--shell-completion", "-sc")
PRINTING = (*COMPLETION, *INFO, "--help", "-h", "--hydra-help", "--version", "--cfg", "-c")
"""Options that print something and run nothing"""


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(Hydra's options with their values, all other words). A word of the latter may be no override."""
    options: list[str] = []
    words: list[str] = []
    before = ""
    for text in arguments:
        is_value = before in VALUED or (before in INFO and text in INFO_CHOICES)
        before = "" if is_value else text
        (options if is_value or text.startswith("-") else words).append(text)
    return options, words


def is_completion(options: Sequence[str]) -> bool:
    """Whether the words are for Hydra's shell completion (`-sc install=bash`), and no overrides."""
    return any(text in COMPLETION for text in options)


def is_printing(options: Sequence[str]) -> bool:
    """Whether Hydra only prints something and runs nothing."""
    return any(text.split("=", 1)[0] in PRINTING for text in options)


def is_sweep(arguments: Sequence[str]) -> bool:
    return any(text in ("-m", "--multirun") for text in arguments)


def end_with_reader(options: Sequence[str]) -> None:
    """Where these options only print something, end silently once nobody reads it, as in `--help | head`."""
    if is_printing(options):
        end_with_closed_pipe()


def end_with_closed_pipe() -> None:
    """Let a write to a pipe that nobody reads end this process without a message, as other commands do.

    Not for a process that has others to end.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
