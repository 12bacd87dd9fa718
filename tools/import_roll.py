"""ROLL's RLVR configuration as overrides of ours, and key by key what became of it.

    python -m megarl.tools.import_roll FILE.yaml [--allow-loss] [--write NAME [--config-dir DIR]]

The overrides go to standard output, one a line, to be given to `python -m megarl.train`; the report goes to standard
error. What the file leaves out has ROLL's default. Nothing comes from the tiny task or from a preset that ROLL's file
does not say.

Exit code 0: the overrides load, and nothing is left to be decided by hand. 1: they do not load, or something is left;
the last line names its keys. 2: the file is none of ROLL's RLVR pipeline. --allow-loss accepts what is left. --write
also saves the overrides, where the code is 0, as experiment/NAME.yaml in DIR, a directory of your own (megarl's conf/
where none is given), for `python -m megarl.train --config-dir DIR experiment=NAME`.
"""

import argparse
import sys
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from megarl.config.checks.keys import find_unused
from megarl.config.errors import ConfigError
from megarl.config.load import compose_config, load_config
from megarl.config.names import Outcome, import_roll, read_roll_file
from megarl.config.overrides import CONF_DIR
from megarl.config.values import write_value


def check(outcomes: list[Outcome]) -> tuple[dict[str, str], list[str]]:
    """The overrides that have an effect, and what keeps them from loading."""
    overrides = {key: write_value(value) for outcome in outcomes for key, value in outcome.overrides.items()}
    try:
        config = compose_config([f"{key}={text}" for key, text in overrides.items()])
        overrides = {key: text for key, text in overrides.items() if key not in dict(find_unused(config, overrides))}
        load_config([f"{key}={text}" for key, text in overrides.items()])
    except ConfigError as error:
        return overrides, [f"error: {problem}" for problem in error.problems]
    return overrides, []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--allow-loss", action="store_true", help="exit code 0 although something is left to decide")
    parser.add_argument("--write", metavar="NAME", help="save as DIR/experiment/NAME.yaml, too")
    parser.add_argument("--config-dir", metavar="DIR", type=Path, default=CONF_DIR, help="default: megarl's conf/")
    arguments = parser.parse_args()
    target = arguments.config_dir / "experiment" / f"{arguments.write}.yaml"
    try:
        if arguments.write and target.exists():
            raise ValueError(f"--write: {target} is there already; choose another name")
        outcomes = import_roll(read_roll_file(arguments.file))
    except (OSError, YAMLError, ValueError, OmegaConfBaseException, RecursionError) as error:
        print(f"error: {arguments.file}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    overrides, problems = check(outcomes)
    texts = [f"{key}={text}" for key, text in overrides.items()]
    left = ", ".join(outcome.key for outcome in outcomes if outcome.by_hand)
    loads = f"{len(texts)} overrides, which {'do not load' if problems else 'load'}"
    print("\n".join(texts))
    print(*outcomes, *problems, f"\n{loads}; to decide by hand: {left or 'nothing'}", sep="\n", file=sys.stderr)
    code = int(bool(problems or (left and not arguments.allow_loss)))
    if arguments.write and code == 0:
        groups = [text for text in texts if (CONF_DIR / text.split("=")[0]).is_dir()]
        tree = OmegaConf.from_dotlist([text for text in texts if text not in groups])
        defaults = "".join(f"  - override /{text.replace('=', ': ')}\n" for text in groups)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"# @package _global_\ndefaults:\n{defaults}{OmegaConf.to_yaml(tree)}")
    sys.exit(code)


if __name__ == "__main__":
    main()
