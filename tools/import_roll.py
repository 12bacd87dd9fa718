"""ROLL's RLVR configuration as overrides of ours, and key by key what became of it.

    python -m megarl.tools.import_roll FILE.yaml [--allow-loss] [--write NAME [--config-dir DIR]]

The overrides go to standard output, one a line, to be given to `python -m megarl.train`; the report goes to standard
error. What the file leaves out has ROLL's default. Nothing comes from the tiny task or from a preset that ROLL's file
does not say.

Exit code 0: the overrides load, and nothing that is learned is lost, neither data, reward, objective nor model. 1:
they do not load, or something of these is lost; the last line says what. 2: the file is none of ROLL's RLVR pipeline.
--allow-loss accepts what is lost. --write also saves the overrides, where the code is 0, as experiment/NAME.yaml in
DIR, a directory of your own (megarl's conf/ where none is given), for `python -m megarl.train --config-dir DIR
experiment=NAME`.
"""

import argparse
import sys
from pathlib import Path

from yaml import YAMLError

from megarl.config.roll_import import (
    get_exit_code,
    import_roll,
    list_overrides,
    read_roll_file,
    summarize,
    write_experiment,
)
from megarl.config.search_path import CONF_DIR


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--allow-loss", action="store_true", help="exit code 0 although some of what is learned is lost"
    )
    parser.add_argument("--write", metavar="NAME", help="save as DIR/experiment/NAME.yaml, too")
    parser.add_argument("--config-dir", metavar="DIR", type=Path, default=CONF_DIR, help="default: megarl's conf/")
    arguments = parser.parse_args()
    target = arguments.config_dir / "experiment" / f"{arguments.write}.yaml"
    try:
        if arguments.write and target.exists():
            raise ValueError(f"--write: {target} is there already; choose another name")
        file = read_roll_file(arguments.file)
    except (OSError, YAMLError, ValueError) as error:
        print(f"error: {arguments.file}: {error}", file=sys.stderr)
        sys.exit(2)
    outcomes, problems = import_roll(file)
    overrides = list_overrides(outcomes)
    print("\n".join(f"{key}={text}" for key, text in overrides.items()))
    for line in (*outcomes, *(f"error: {problem}" for problem in problems)):
        print(line, file=sys.stderr)
    print(f"\n{summarize(outcomes, problems, arguments.allow_loss)}", file=sys.stderr)
    code = get_exit_code(outcomes, problems, arguments.allow_loss)
    if arguments.write and code == 0:
        write_experiment(target, overrides, arguments.file.name)
    sys.exit(code)


if __name__ == "__main__":
    main()
