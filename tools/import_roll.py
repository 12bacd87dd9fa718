"""ROLL's RLVR configuration as overrides of ours, and key by key what became of it.

    python -m megarl.tools.import_roll FILE.yaml >overrides.txt

The overrides go to standard output, one a line, and `xargs -d '\\n' -a overrides.txt megarl train` starts them; the
report goes to standard error. What the file leaves out has ROLL's default. Nothing comes from the tiny task or from
a preset that ROLL's file does not say.

Exit code 0: the overrides load, and nothing is left to be decided by hand. 1: they do not load, or something is left;
the last line names its keys. 2: the file is none of ROLL's RLVR pipeline.
"""

import argparse
import sys
from pathlib import Path

from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megarl.config.checks import find_unused
from megarl.config.errors import ConfigError
from megarl.config.load import compose_config, load_config
from megarl.config.names import import_roll, read_roll_file
from megarl.config.overrides import write_value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    try:
        outcomes = import_roll(read_roll_file(file))
    except (OSError, YAMLError, ValueError, OmegaConfBaseException, RecursionError) as error:
        print(f"error: {file}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    texts = {key: f"{key}={write_value(value)}" for each in outcomes for key, value in each.overrides.items()}
    problems: list[str] = []
    try:
        unused = dict(find_unused(compose_config(list(texts.values())), texts))
        texts = {key: text for key, text in texts.items() if key not in unused}
        load_config(list(texts.values()))
    except ConfigError as error:
        problems = [f"error: {problem}" for problem in error.problems]
    left = ", ".join(outcome.key for outcome in outcomes if outcome.by_hand)
    loads = f"{len(texts)} overrides, which {'do not load' if problems else 'load'}"
    print(*texts.values(), sep="\n")
    print(*outcomes, *problems, f"\n{loads}; to decide by hand: {left or 'nothing'}", sep="\n", file=sys.stderr)
    sys.exit(int(bool(problems or left)))


if __name__ == "__main__":
    main()
