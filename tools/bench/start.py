"""From the command to the first response of a run: when each process began, what it used, when each thing was there.

    python tools/bench/start.py [--goal 10] [KEY=VALUE ...]

Runs `megarl.train` with one iteration (further arguments: its overrides), looks at its processes and log files 20
times a second, and prints a timeline in seconds since the command. The last line divides the goal by the seconds.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

LOOK_EVERY_S = 0.05
DEADLINE_S = 300.0
WIDTH = 60
"""Columns of the drawn bars"""
EVENTS = {
    "the configuration is checked": ("run.json", ""),
    "a server's imports are made": ("logs/server-0.log", "server_args="),
    "the server answers": ("logs/server-0.log", "Uvicorn running"),
    "policy and critic are built": ("train.log", "policy: local layers"),
    "the first prompts are with the server": ("logs/server-0.log", "POST /generate"),
}
"""What is looked for in which file of the run's folder, in the order of time; empty: that it is there"""
FIRST_RESPONSE = "the first prompts are with the server"


@dataclass
class Seen:
    """A process of the run."""

    name: str
    began: float
    """Seconds since the command"""
    samples: list[tuple[float, float]] = field(default_factory=list)
    """Seconds since the command, CPU seconds until then"""


def name_process(process: psutil.Process) -> str:
    """`ray::WorkerActor.build`, `sglang::scheduler`, `sglang.launch_server`, `raylet`."""
    words: list[str] = process.cmdline()
    if "-m" in words[:6]:
        return words[words.index("-m") + 1]
    scripts = [Path(word).name for word in words[:6] if word.endswith(".py")]
    return (
        scripts[0] if scripts and "python" in words[0] else " ".join(Path(words[0]).name.split()[:1]) or process.name()
    )


def look(root: psutil.Process, begun: float, seen: dict[int, Seen]) -> None:
    for process in [root, *root.children(recursive=True)]:
        try:
            used = process.cpu_times()
            known = seen.setdefault(process.pid, Seen(name_process(process), process.create_time() - begun))
            known.name = name_process(process)
            known.samples.append((time.time() - begun, used.user + used.system))
        except (psutil.NoSuchProcess, psutil.AccessDenied, IndexError):
            continue


def follow(overrides: list[str], run_dir: Path) -> tuple[dict[str, float], dict[int, Seen]]:
    """When each of EVENTS was seen, and the processes until the last; the run is then ended."""
    command = [sys.executable, "-m", "megarl.train", "train.num_iterations=1", f"hydra.run.dir={run_dir}", *overrides]
    begun = time.time()
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    root, events, seen = psutil.Process(run.pid), dict[str, float](), dict[int, Seen]()
    try:
        while FIRST_RESPONSE not in events:
            look(root, begun, seen)
            for event, (name, text) in EVENTS.items():
                path = run_dir / name
                if event not in events and path.is_file() and text in path.read_text(errors="replace"):
                    events[event] = time.time() - begun
            if run.poll() is not None or time.time() - begun > DEADLINE_S:
                raise SystemExit(f"the run did not come to its first response (exit code {run.poll()}); see {run_dir}")
            time.sleep(LOOK_EVERY_S)
    finally:
        run.terminate()
        run.wait(DEADLINE_S)
    return events, seen


def draw(events: dict[str, float], seen: dict[int, Seen]) -> str:
    """A line per event and per process that used half a second: `#` where it used most of a core, `.` where it was."""
    end = max(events.values())
    lines = [f"{events[event]:6.1f} s  {event}" for event in EVENTS if event in events]
    lines += ["", f"{'process':28}{'began':>7}{'CPU s':>7}"]
    for one in sorted(seen.values(), key=lambda each: each.began):
        if one.samples[-1][1] < 0.5:
            continue
        bar = ""
        for column in range(WIDTH):
            low, high = end * column / WIDTH, end * (column + 1) / WIDTH
            used = [cpu for at, cpu in one.samples if at <= high]
            before = [cpu for at, cpu in one.samples if at <= low]
            share = ((used[-1] if used else 0.0) - (before[-1] if before else 0.0)) / (end / WIDTH)
            bar += " " if high < one.began else "#" if share > 0.5 else "+" if share > 0.1 else "."
        lines.append(f"{one.name[:27]:28}{max(one.began, 0):7.1f}{one.samples[-1][1]:7.1f}  {bar}")
    total = sum(one.samples[-1][1] for one in seen.values())
    lines.append(f"{'all':35}{total:7.1f}  CPU seconds of {end * psutil.cpu_count():.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--goal", type=float, default=10.0, help="seconds to the first response")
    args, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        events, seen = follow(overrides, Path(folder) / "run")
    print(draw(events, seen))
    seconds = events[FIRST_RESPONSE]
    print(f"ratio: {args.goal / seconds:.2f} goal: 1.00")


if __name__ == "__main__":
    main()
