"""README.md, CONTRIBUTING.md, CHANGELOG.md, docs/ and the READMEs of examples/: every command is run or composed.

A fenced block of bash, console or python is one of:
- run: the doctor, the planner, --help and --cfg, examples of errors, python; a console block's output is compared,
  where `...` stands for any text and a line of it for any lines;
- composed: megarl.train, evaluate and sbatch, whose overrides are checked as the command would; make,
  pytest and the other tools, whose targets, paths and options must exist;
- marked as neither, by a comment above the block: <!-- not run: REASON -->.

A block below <!-- file: NAME --> is written to that file, which the python blocks and commands of the same text find.
"""

import contextlib
import functools
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tool_loading import load_tool

from megarl.algo import objective
from megarl.cli import COMMANDS, create_task
from megarl.config.load import check_overrides, expand_sets, load_config, load_configs
from megarl.config.overrides import take_config_dirs
from megarl.config.placement import list_contradictions
from megarl.config.schema.root import ClusterConfig
from megarl.run.command import EXIT_BAD_CONFIG, check_command_line, check_training, save_run

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
TEXTS += sorted((ROOT / "examples").glob("*/README.md"))
LANGUAGES = ("bash", "console", "python")
MARK = re.compile(r"<!-- (not run|file): (.+) -->")
NUM_MARKED = 10
"""Blocks that are neither run nor composed. A new one raises it, with its reason above the block."""
TIMEOUT_S = 120
CHECKED = ("tools/", "tests/e2e/", "tests/parallel/", "tests/simulate.py")


@dataclass(frozen=True)
class Block:
    file: Path
    line: int
    language: str
    text: str
    marks: dict[str, str]
    """what the comment above it says: `not run` with the reason, or `file` with its name"""

    @property
    def reason(self) -> str | None:
        """Why it is neither run nor composed; None: it is."""
        return self.marks.get("not run")

    @property
    def name(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def find_blocks(file: Path) -> Iterator[Block]:
    """The fenced blocks, indented ones included."""
    lines = file.read_text().splitlines()
    start = None
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if start is None:
            start = number
            continue
        above = next((text for text in reversed(lines[:start]) if text.strip()), "")
        mark = MARK.fullmatch(above.strip())
        text = "\n".join(lines[start + 1 : number])
        yield Block(file, start + 1, lines[start].strip().strip("`"), text, dict([mark.groups()]) if mark else {})
        start = None


BLOCKS = [block for file in TEXTS for block in find_blocks(file)]


def list_commands(text: str) -> list[list[str]]:
    """The words of each command; comments are left out, a backslash joins lines."""
    joined = text.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def list_sessions(text: str) -> list[tuple[str, list[str]]]:
    """Each `$ command` of a console block and the lines of output below it."""
    sessions: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            sessions.append((line[2:], []))
        else:
            sessions[-1][1].append(line.rstrip())
    return sessions


def matches(shown: Sequence[str], found: str) -> bool:
    """Whether the output is what is shown."""
    patterns = [
        r"(?:.*\n)*?" if line == "..." else ".*".join(map(re.escape, line.split("..."))) + r"\n" for line in shown
    ]
    printed = "".join(f"{line.rstrip()}\n" for line in found.strip().splitlines())
    return re.fullmatch("".join(patterns), printed) is not None


# What runs, and what is composed, by the first words of a command.


def compose_run(command: str, arguments: Sequence[str]) -> None:
    """Check overrides as `megarl COMMAND` does before it starts anything."""
    given = take_config_dirs(arguments)
    overrides = [text for text in given if not text.startswith("-") and not text.startswith("resume=")]
    if command == "evaluate":
        load_configs(expand_sets(overrides))
    else:
        check_overrides(overrides, command)


def compose_job(arguments: Sequence[str]) -> None:
    """sbatch [options] slurm/train.sh [overrides]: the configuration, and whether its roles fit the allocation."""
    script = arguments.index("slurm/train.sh")
    overrides = list(arguments[script + 1 :])
    if overrides[0].startswith("resume="):
        return
    options = dict(text.lstrip("-").split("=", 1) for text in arguments[:script])
    given = [f"cluster.num_nodes={options.get('nodes', 8)}", "cluster.gpus_per_node=8"]
    config = load_config(["cluster=slurm", *given, *overrides])
    assert isinstance(config.cluster, ClusterConfig)
    assert list_contradictions(config) == []


def run_refused(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a command line that megarl.train refuses before it starts anything."""
    monkeypatch.setattr(sys, "argv", ["megarl.train", *arguments])
    with pytest.raises(SystemExit) as ended:
        check_command_line(check_training)
    return int(ended.value.code or 0)


def run_process(words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable if words[0] == "python" else words[0], *words[1:]]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return subprocess.run(
        command, cwd=ROOT, env=environment | {"MEGARL_PYTHON": sys.executable}, capture_output=True, text=True,
        timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


@functools.cache
def plan(arguments: tuple[str, ...]) -> tuple[int, str]:
    """Exit code and output of tools/plan.py."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = load_tool("plan.py").main(arguments)
    return code, printed.getvalue()


def write_runs(text: str) -> None:
    """The run of each `model.path=RUN_DIR/policy`, whose settings come along as from the user's."""
    for run_dir in map(Path, re.findall(r"model\.path=(\S+)/policy", text)):
        if not run_dir.exists():
            save_run(run_dir, load_config(["algo=grpo"]), [])
            (run_dir / "policy").mkdir()


def write_files(text: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that the blocks of this text show, where its commands and python blocks find them."""
    for block in BLOCKS:
        if block.file == text and (name := block.marks.get("file")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(block.text + "\n")
            # Imported anew here, and not left behind.
            monkeypatch.setitem(sys.modules, Path(name).stem, sys)
            del sys.modules[Path(name).stem]
            objective.find_advantage.cache_clear()
    monkeypatch.syspath_prepend(folder)


def normalize(words: Sequence[str]) -> list[str]:
    """The command without variables of its environment, a tool of the installed package as the one in tools/."""
    start = next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word))
    match list(words[start:]):
        case ["megarl", name, *arguments] if COMMANDS.get(name, ("",))[0]:
            return normalize(["python", "-m", COMMANDS[name][0], *arguments])
        case ["python", "-m", "megarl.plan.command", *arguments]:
            return ["python", "tools/plan.py", *arguments]
        case ["python", "-m", module, *arguments] if module.startswith("megarl.tools."):
            return ["python", f"tools/{module.removeprefix('megarl.tools.').replace('.', '/')}.py", *arguments]
        case rest:
            return rest


FOLDERS: dict[str, Callable[[str], None]] = {"megarl": lambda name: create_task([name]), "cd": os.chdir}


def find_handler(words: Sequence[str]) -> Callable[[], object] | None:
    """What runs or composes the command; None: nothing does."""
    match list(words):
        case ["python", "-m", "megarl.train" | "megarl.run.preview", *arguments] | ["megarl", "evaluate", *arguments]:
            if {"--cfg", "--help", "--version"} & set(arguments):
                return lambda: expect(run_process(words))
            return lambda: compose_run("evaluate" if words[0] == "megarl" else "train", arguments)
        case ["python", "-m", "megarl.plan.doctor", *_]:
            return lambda: expect(run_process(words))
        case ["python", "tools/plan.py", *arguments]:
            return lambda: expect_code(plan(tuple(arguments))[0])
        case ["python", "tools/docs/generate.py", "--check"]:
            return lambda: expect(run_process(words))
        case ["python", tool, *arguments] if tool.startswith(CHECKED):
            return lambda: check_tool(tool, arguments)
        case ["slurm/train.sh", "--local", *_]:
            return lambda: expect(run_process(words))
        case ["sbatch", *arguments] if "slurm/train.sh" in arguments:
            return lambda: compose_job(arguments)
        case ["make", *arguments]:
            return lambda: check_target(arguments)
        case ["megarl", "new", folder] | ["cd", folder]:
            return lambda: FOLDERS[words[0]](folder)
        case [program, "-m", "pytest", *arguments] if program.endswith("python"):
            return lambda: check_paths(arguments)
    return None


def expect(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout + done.stderr


def expect_code(found: int) -> None:
    assert found == 0


def check_target(arguments: Sequence[str]) -> None:
    """The target and the variables are those of the Makefile; nothing is made."""
    targets = [text for text in arguments if "=" not in text]
    assert targets
    expect(run_process(["make", "--dry-run", *arguments]))
    makefile = (ROOT / "Makefile").read_text()
    for name in (text.split("=")[0] for text in arguments if "=" in text):
        assert re.search(rf"\b{name} \?=|\$\({name}\)", makefile), f"the Makefile does not read {name}"


def check_tool(tool: str, arguments: Sequence[str]) -> None:
    """The script exists and knows each word of the command that is not a file's name; overrides compose."""
    source, folder = (ROOT / tool).read_text(), ROOT / "tools" / "bench"
    if (ROOT / tool).parent == folder:  # a bench's subjects and experiments are files beside it
        source += "".join(file.read_text() for file in [*folder.glob("*.py"), folder / "experiments" / "table.yaml"])
    for word in (text.split("=")[0] for text in arguments):
        is_action = re.fullmatch("[a-z]+(-[a-z]+)*", word) is not None and "=" not in word
        if word.startswith("--") or (is_action and f"{word}=" not in " ".join(arguments)):
            assert re.search(rf"{re.escape(word)}\b", source), f"{tool} has no {word}"
    own = load_tool("variance.py").OWN if tool == "tools/variance.py" else ()
    check_overrides([*own, *(text for text in arguments if re.match(r"[a-z_.]+=", text))])


def check_paths(arguments: Sequence[str]) -> None:
    for path in (text.split("::")[0] for text in arguments if text.startswith("tests")):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "bash" and not b.reason], ids=lambda block: block.name
)
def test_a_command_runs_or_composes(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if block.file.is_relative_to(ROOT / "examples"):
        shutil.copytree(block.file.parent, tmp_path, dirs_exist_ok=True)
    write_files(block.file, tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    write_runs(block.text)
    for words in list_commands(block.text):
        handle = find_handler(normalize(words))
        assert handle is not None, f"{shlex.join(words)}: neither run nor composed; mark the block with the reason"
        handle()


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "console" and not b.reason], ids=lambda block: block.name
)
def test_a_command_prints_what_is_shown(
    block: Block, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command, shown in list_sessions(block.text):
        match normalize(shlex.split(command, comments=True)):
            case ["python", "-m", "megarl.train", *arguments]:
                assert run_refused(arguments, monkeypatch) == EXIT_BAD_CONFIG
                printed = "".join(capsys.readouterr())
            case ["python", "tools/plan.py", *arguments]:
                printed = plan(tuple(arguments))[1]
            case ["python", "-m", "megarl.plan.doctor", *_] as words:
                if shutil.which("nvidia-smi"):
                    pytest.skip("what is shown is the report of a machine without GPUs")
                printed = run_process(words).stdout
            case words:
                pytest.fail(f"{shlex.join(words)}: not run; mark the block with the reason")
        assert matches(shown, printed), f"$ {command}\n{printed}"


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "python" and not b.reason], ids=lambda block: block.name
)
def test_a_python_block_runs_and_prints_what_its_comments_say(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(block.file, tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, block.name, "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out.replace("000", "")  # the numbers of a tensor as a comment has them
    for expected in re.findall(r"^ *print\(.*\)  # ((?:algo\.|\d).*)$", block.text, re.MULTILINE):
        assert expected in printed


def test_the_blocks_that_are_not_run_are_counted() -> None:
    marked = [block for block in BLOCKS if block.reason]
    assert len(marked) == NUM_MARKED, "\n".join(f"{block.name}: {block.reason}" for block in marked)


def test_a_block_without_a_language_holds_no_command() -> None:
    commands = re.compile(r"^\s*(\$ |python |make |sbatch |pip |git )", re.MULTILINE)
    wrong = [b.name for b in BLOCKS if b.language not in LANGUAGES and commands.search(b.text)]
    assert not wrong, wrong


def list_all_texts() -> list[Path]:
    """What a user reads: the texts, configuration files and job scripts with their comments, and what the code says."""
    folders = ("conf", "examples", "slurm", "megarl", "tools")
    found = [path for name in folders for path in sorted((ROOT / name).rglob("*")) if path.is_file()]
    return [*TEXTS, ROOT / "Makefile", *(path for path in found if path.suffix in {".md", ".yaml", ".sh", ".py"})]


PIP = re.compile(r"pip3? install[^\n;,)`]*?[\s'\"]megarl(?![\w./*-])")
"""The name alone, which on the package index is somebody else's; megarl-*.whl, ./megarl and . are files"""


def test_no_text_installs_a_strangers_package() -> None:
    wrong = [f"{path.relative_to(ROOT)}: {m[0]}" for path in list_all_texts() for m in PIP.finditer(path.read_text())]
    assert wrong == []
    assert all(PIP.search(f"pip install {text}") for text in ("megarl", "'megarl[wandb]'", "-U megarl==1", '"megarl"'))
    assert not any(PIP.search(f"pip install {text}") for text in (".", "'.[wandb]'", "megarl-*.whl", "./megarl"))
