"""Imports every example of a checkout of ROLL and prints docs/results/roll-import.md.

Run: python tools/bench/roll_import.py ROLL_DIRECTORY [--commit HASH] > docs/results/roll-import.md
"""

import argparse
import re
import subprocess
from collections import Counter
from pathlib import Path

from yaml import YAMLError

from megarl.algo.objective import format_objective
from megarl.config.load import load_config
from megarl.tools.import_roll import Outcome, get_exit_code, import_roll, list_losses, list_overrides
from megarl.tools.roll_file import read_roll_file

PAGE = """\
# Import of ROLL's own examples

<!-- made by tools/bench/roll_import.py -->

`tools/import_roll.py` over each file of `examples/` of [ROLL](https://github.com/alibaba/ROLL) at commit
`{commit}`. ROLL's files are not a part of this repository.

<!-- not run: needs a checkout of ROLL -->
```bash
git clone https://github.com/alibaba/ROLL /tmp/ROLL && git -C /tmp/ROLL checkout {short}
python tools/bench/roll_import.py /tmp/ROLL > docs/results/roll-import.md
```

{num_files} files are of the RLVR pipeline. The overrides of {num_loaded} load. {num_whole} lose nothing that is learned
and end with code 0. The others end with code 1 and name what is lost: data, reward, objective or model.
{refused}

What the columns say: `code` without `--allow-loss`. `lost`: ROLL's keys of what is learned without a counterpart; of
`reward`, ROLL's domains. `objective`: the number of the imported one in the second table.

| file of `examples/` | code | lost | objective |
| --- | --- | --- | --- |
{rows}

## Imported objectives

| number | objective |
| --- | --- |
{objectives}

## What the importer does not see

- The architecture: a checkpoint of a family that is not trained here is refused when the run starts
  ([model families](../extending/model-family.md)).
- Rows of a file that belong to another of ROLL's domains, where the file has one domain alone.
- `top_p` and `top_k` of the rollout, which have no counterpart: ROLL samples from the truncated distribution and trains
  with the log-probs of the full one.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("roll", type=Path)
    parser.add_argument("--commit", help="where the directory is no git checkout")
    arguments = parser.parse_args()
    commit = arguments.commit or _read_commit(arguments.roll)
    root = arguments.roll / "examples"
    rows: list[str] = []
    objectives: list[str] = []
    codes: Counter[int] = Counter()
    loaded = 0
    refused: Counter[str] = Counter()
    for path in sorted(root.rglob("*.yaml")):
        try:
            file = read_roll_file(path)
        except (OSError, YAMLError, ValueError) as error:
            refused[_shorten(str(error))] += 1
            continue
        outcomes, problems = import_roll(file)
        code = get_exit_code(outcomes, problems)
        codes[code] += 1
        loaded += not problems
        number = "does not load"
        if not problems:
            text = _format_objective(outcomes)
            objectives += [] if text in objectives else [text]
            number = str(objectives.index(text) + 1)
        rows.append(f"| {path.relative_to(root)} | {code} | {_format_losses(outcomes)} | {number} |")
    page = PAGE.format(
        commit=commit,
        short=commit[:12],
        num_files=len(rows),
        num_loaded=loaded,
        num_whole=codes[0],
        refused=_format_refused(refused),
        rows="\n".join(rows),
        objectives="\n".join(f"| {n} | {text} |" for n, text in enumerate(objectives, start=1)),
    )
    print(page, end="")


def _read_commit(directory: Path) -> str:
    command = ["git", "-C", str(directory), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _shorten(error: str) -> str:
    """Of which other pipeline the file is."""
    named = re.search(r"a file of ROLL's (\w+) pipeline", error)
    return named.group(1) if named else "parts of files and others"


def _format_refused(refused: Counter[str]) -> str:
    named = ", ".join(f"{name} {number}" for name, number in refused.most_common())
    return f"{refused.total()} further files are of other pipelines and end with code 2:\n{named}."


def _format_losses(outcomes: list[Outcome]) -> str:
    def name(key: str) -> str:
        parts = key.split(".")
        return parts[1] if parts[0] == "rewards" and len(parts) > 2 else parts[-1]

    lost = list_losses(outcomes).items()
    return "; ".join(f"{kind}: {', '.join(map(name, keys))}" for kind, keys in lost) or "nothing"


def _format_objective(outcomes: list[Outcome]) -> str:
    config = load_config([f"{key}={text}" for key, text in list_overrides(outcomes).items()])
    _, loss, advantage, *rest = format_objective(config.algo, config.train.responses_per_prompt).splitlines()
    lines = [" ".join(line.split()) for line in (loss, advantage, *rest)]
    groups = "; groups of equal rewards are replaced" if config.algo.dynamic_sampling.enabled else ""
    return ("`" + "`; `".join(lines) + f"`{groups}").replace("|", "\\|")


if __name__ == "__main__":
    main()
