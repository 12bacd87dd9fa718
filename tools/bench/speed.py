"""How fast a part of megarl is, measured on this machine: one harness, and a file beside it for each subject.

    python tools/bench/speed.py mfu         share of the machine's matmul peak that updates and log-probs reach
    python tools/bench/speed.py sync        weight sync beside full gather and broadcast and beside a checkpoint on disk
    python tools/bench/speed.py sync_plan   bytes and seconds of the weight sync of layouts that do not fit here
    python tools/bench/speed.py driver      the driver's own work from the servers' answers to what the ranks are sent
    python tools/bench/speed.py trl         samples per second of megarl's GRPO and of TRL's

Each way of a subject is run --warm-up times and then --repeats times, in turns with the other ways, and the table has
the median and the range of the seconds. --json FILE writes all numbers. The last line is `ratio: X goal: Y`. Options of
a subject: python tools/bench/speed.py SUBJECT --help.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

SUBJECTS = {"mfu": "mfu", "sync": "sync", "sync_plan": "sync_plan", "driver": "driver", "trl": "beside_trl"}
"""Name -> the module beside this one with `add_arguments(parser)` and `run(args) -> Result`"""
Numbers = Mapping[str, float]
"""What one call of a way found besides its seconds"""


@dataclass(frozen=True)
class Result:
    rows: Sequence[Mapping[str, Any]]
    """The table, by the names of its columns; the first row names them all"""
    ratio: float
    goal: float
    notes: Sequence[str] = field(default_factory=tuple)
    """Lines below the table"""


def take_turns(ways: Mapping[str, Callable[[], Numbers]], repeats: int, warm_up: int) -> dict[str, list[Numbers]]:
    """Call each way `warm_up` + `repeats` times, one after the other in turns; of the last `repeats` calls what each
    found and its `seconds`, unless it has measured those itself.
    """
    found: dict[str, list[Numbers]] = {name: [] for name in ways}
    for turn in range(warm_up + repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            numbers = way()
            seconds = time.perf_counter() - start
            if turn >= warm_up:
                found[name].append({"seconds": seconds, **numbers})
    return found


def find_medians(calls: Sequence[Numbers]) -> dict[str, float]:
    return {name: statistics.median(call[name] for call in calls) for name in calls[0]}


def describe_range(values: Sequence[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g}"


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    lines: list[Sequence[Any]] = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[row.get(name, "") for name in rows[0]] for row in rows]
    return "\n".join(f"| {' | '.join(map(format_cell, line))} |" for line in lines)


def format_cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def find_status(field_name: str) -> int:
    """Bytes of a field of /proc/self/status."""
    (line,) = [t for t in Path("/proc/self/status").read_text().splitlines() if t.startswith(f"{field_name}:")]
    return int(line.split()[1]) * 1024


def main() -> None:
    name = next((word for word in sys.argv[1:] if word in SUBJECTS), None)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=tuple(SUBJECTS))
    parser.add_argument("--repeats", type=int, default=3, help="calls of each way that count")
    parser.add_argument("--warm-up", type=int, default=1, help="calls before them")
    parser.add_argument("--json", type=Path, help="a file for all numbers")
    if name is not None:
        subject = import_module(SUBJECTS[name])
        parser.description = subject.__doc__
        subject.add_arguments(parser)
    args = parser.parse_args()
    result: Result = subject.run(args)
    print(format_table(result.rows))
    for note in result.notes:
        print(note)
    if args.json is not None:
        content = {"subject": name, "arguments": vars(args), **vars(result)}
        args.json.write_text(json.dumps(content, indent=1, default=str) + "\n")
    print(f"ratio: {result.ratio:.2f} goal: {result.goal:g}")


if __name__ == "__main__":
    # The subjects import this module; they are to find this one.
    sys.modules["speed"] = sys.modules["__main__"]
    main()
