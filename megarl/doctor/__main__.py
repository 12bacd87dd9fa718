"""`megarl doctor [group=option] [key=value] ...`: can this configuration run on this machine?

Exit code 0: it can. 1: something is missing or wrong. 2: the configuration itself is wrong.
"""

import os
import sys

from megarl.config.errors import ConfigError
from megarl.config.load import load
from megarl.config.search_path import take_config_dirs
from megarl.doctor.facts import Probe, gather
from megarl.doctor.judge import assume_allocation, count_stopping, find_need, judge, render
from megarl.run.arguments import end_with_closed_pipe
from megarl.run.command import end_with_config_error

EXIT_MISSING = 1


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return
    try:
        arguments = take_config_dirs(sys.argv[1:])
        options = [text for text in arguments if text.startswith("-")]
        if options:
            raise ConfigError([f"{options[0]}: no such option; the doctor takes key=value, as megarl.train does"])
        assumed = assume_allocation(arguments, os.environ)
        loaded = load([*arguments, *assumed])
        for line in loaded.lines:
            print(line)
    except ConfigError as error:
        end_with_config_error(error)
    need = find_need(loaded.config, arguments, assumed)
    facts = gather(loaded.config, Probe())
    findings = judge(facts, need)
    print("\n".join(render(" ".join(arguments) or "the default configuration", facts, need, findings)))
    sys.exit(EXIT_MISSING if count_stopping(findings) else 0)


if __name__ == "__main__":
    end_with_closed_pipe()
    main()
