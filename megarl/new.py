"""`megarl new DIR`: a folder with a task of your own, which trains as it is: examples/own_task."""

import argparse
import shlex
import shutil
import sys
from pathlib import Path

from megarl.config.errors import ConfigError

EXAMPLE = Path(__file__).resolve().parent / "examples" / "own_task"


def create_task(directory: Path) -> None:
    """Copy the example. Raises ConfigError where something is in the way."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(
            [f"new: found {directory}, which is there already; name a folder that is not, or an empty one"]
        )
    try:
        shutil.copytree(EXAMPLE, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    except OSError as error:
        raise ConfigError([f"new: {directory} cannot be made: {error}"]) from error


def main() -> None:
    """Ends the process with code 2 where the folder cannot be made."""
    parser = argparse.ArgumentParser(prog="megarl new", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR")
    directory: Path = parser.parse_args().directory
    try:
        create_task(directory)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{directory}: README.md says what to change")
    print(f"next: cd {shlex.quote(str(directory))} && megarl train --config-dir . experiment=own_task")


if __name__ == "__main__":
    main()
