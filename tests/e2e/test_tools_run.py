"""Every tool and bench that README and docs name runs, in a small form, with each option that they give it.

Each runs in a copy of tools/ and docs/, so that the pages and pictures that it writes are not the checkout's.
"""

import os
import re
import shlex
import shutil
import string
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from page_run import write_page_run
from tool_loading import load_tool

from megarl.config.schema.roles import RandomModelConfig
from megarl.models.checkpoint import build_random_checkpoint

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DEADLINE_S = 500
RATIO = r"ratio: (-?\d+\.\d+|nan) goal: \d+(\.\d+)?"
"""The last line of what measures"""
SMALL = "--rows 2 --layers 2 --tokens-per-microbatch 256 --repeats 1"
EXPERIMENTS = r"\d+ experiments: .*"
SHORT = "train.num_iterations=1 train.eval_every=1 train.num_eval_prompts=4 train.samples_per_iteration=32"
SHORT += " train.samples_per_minibatch=32 algo.value_pretrain.steps=1"

COMMANDS = {
    f"bench/experiments.py guess:vapo --seeds 9 --out out {SHORT}": EXPERIMENTS,
    "bench/experiments.py --table": EXPERIMENTS,
    "bench/speed.py driver --rows 32 --length 64 --repeats 1 --warm-up 0": RATIO,
    f"bench/speed.py mfu {SMALL} --dtype float32 --only update generation": RATIO,
    "bench/speed.py sync --hidden 256 --layers 2 --repeats 1 --transport split": RATIO,
    "bench/speed.py sync_plan --layers 12": RATIO,
    "bench/speed.py trl --cell 4x2x4-float32 --repeats 1 --warm-up 0 --threads 1 --model model": RATIO,
}
"""Arguments of python, below tools/ and in the folder `place` -> what the last line that it prints is"""
ELSEWHERE = {
    "check_gpu.py": "unit/tools/test_check_gpu.py",
    "convert_checkpoint.py": "unit/mcore/test_convert.py",
    "docs/generate.py": "docs/test_doc_commands.py",
    "import_roll.py": "unit/tools/test_import_roll.py",
    "plan.py": "docs/test_doc_commands.py",
    "report.py": "unit/report/test_page.py",
}
"""A tool, or one option of it -> the file below tests/ that runs it"""

TRL = """
import torch
__version__, PPOTrainer = "0", None
class GRPOConfig:
    def __init__(self, **keys): vars(self).update(keys)
class GRPOTrainer:
    def __init__(self, args, callbacks, **others): self.args, self.callbacks = args, callbacks
    def _generate_and_score_completions(self, inputs):
        return {"completion_mask": torch.ones(2, self.args.max_completion_length, dtype=torch.long)}
    def train(self):
        for step in range(self.args.max_steps):
            for callback in self.callbacks: callback.on_step_begin()
            self._generate_and_score_completions(None)
            for callback in self.callbacks: callback.on_step_end()
"""
"""In place of TRL, whose own environment tools/bench/beside_trl.py would download: as far as trl_grpo.py calls it"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The copy, with what the commands read."""
    place = tmp_path_factory.mktemp("tools")
    for name in ("tools", "docs"):
        shutil.copytree(ROOT / name, place / name)
    model = build_random_checkpoint(
        RandomModelConfig(max_length=256, alphabet=f"{string.ascii_letters}{string.digits} ."),
        tmp_path_factory.mktemp("cache"),
    )
    (place / "model").symlink_to(model)
    write_page_run(place / "run")
    # What beside_trl.py finds instead of making it.
    sys.path.insert(0, str(ROOT / "tools" / "bench"))
    import beside_trl as bench

    stand_in = place / "stand_in"
    (stand_in / "trl").mkdir(parents=True)
    (stand_in / "trl" / "__init__.py").write_text(TRL)
    version = bench.metadata.version("torch").partition("+")[0]
    python = f"{bench.TRL}-torch{version}-python{sys.version_info.major}.{sys.version_info.minor}/bin/python"
    script = place / "cache" / "trl" / python
    script.parent.mkdir(parents=True)
    script.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(stand_in))} exec {shlex.quote(sys.executable)} "$@"\n')
    script.chmod(0o755)
    return place


def run(place: Path, words: Sequence[str]) -> str:
    """Runs Python; the last line that it has printed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MEGARL_CACHE": str(place / "cache")}
    done = subprocess.run(
        [sys.executable, *words], cwd=place, env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-8000:]}"
    return done.stdout.strip().rpartition("\n")[2]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[:60])
@pytest.mark.long
def test_a_tool_runs_and_ends_with_its_line(place: Path, command: str) -> None:
    tool, *arguments = shlex.split(command)
    last = run(place, [f"tools/{tool}", *arguments])
    assert re.fullmatch(COMMANDS[command], last), last


def list_named(text: str) -> list[tuple[str, str]]:
    """Each tool that a text runs, with each option or action that it gives it."""
    found = []
    for name, rest in re.findall(r"python3? (?:-m megarl\.tools\.|tools/)([\w./]+)((?:[^\n\\`#]|\\\n)*)", text):
        tool = f"{name.removesuffix('.py').replace('.', '/')}.py"
        given = re.findall(r"(?<=\s)--[\w-]+", rest)
        found += [(tool, option) for option in given or [""]]
    return found


def test_every_tool_and_option_that_docs_name_is_run_by_a_test() -> None:
    named = {each for text in TEXTS for each in list_named(text.read_text())}
    assert len({tool for tool, _ in named}) >= 5
    run_here = [shlex.split(command) for command in COMMANDS]
    missing = [
        f"tools/{tool} {option}"
        for tool, option in sorted(named)
        if not any(words[0] == tool and (not option or option in words) for words in run_here)
        and not {tool, f"{tool} {option}"} & ELSEWHERE.keys()
    ]
    assert not missing, f"to be added to COMMANDS: {', '.join(missing)}"
    for command, file in ELSEWHERE.items():
        text = (ROOT / "tests" / file).read_text()
        assert Path(command.split()[0]).stem in text
        assert "pytestmark = pytest.mark.slow" not in text


def test_every_bench_is_run_by_a_test() -> None:
    benches = {f"bench/{file.name}" for file in ROOT.glob("tools/bench/*.py") if "__main__" in file.read_text()}
    # Another Python runs it, for beside_trl.py.
    assert benches - {"bench/trl_grpo.py"} == {c.split()[0] for c in COMMANDS if c.startswith("bench/")}
    subjects = {c.split()[1] for c in COMMANDS if c.startswith("bench/speed.py")}
    assert subjects == load_tool("bench/speed.py").SUBJECTS.keys()
