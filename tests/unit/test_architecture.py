"""The rules of the code base that a reader relies on: who imports whom, what each room may use, sizes."""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megarl"

ROOMS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "cli": (8, 895, ("cli", "train", "api", "plan.command", "plan.doctor")),
    "run": (7, 3300, ("run", "trainer", "sweep")),
    "cluster": (6, 1735, ("cluster",)),
    "plan": (6, 2085, ("plan",)),
    "sync": (5, 2182, ("sync",)),
    "mcore": (4, 4800, ("mcore",)),
    "rollout": (4, 5150, ("rollout",)),
    "config": (3, 2580, ("config",)),
    "cpu": (3, 1709, ("cpu",)),
    "algo": (2, 3360, ("algo",)),
    "models": (2, 1660, ("models",)),
    "report": (2, 3360, ("report",)),
    "task": (2, 5720, ("task",)),
    "files": (1, 750, ("files", "signals")),
    "schema": (1, 2075, ("config.schema", "config.errors")),
    "types": (1, 770, ("types", "interfaces", "environment")),
}
"""Floor, most lines and modules of every room. A room imports itself and rooms of lower floors, never one of its own
floor. Raising a budget is a line that a reviewer sees, with its reason in the commit."""
MOST_LINES, MOST_FILES = 42_000, 130
MOST_BESIDE = {"tests": 36_000, "tools": 6_000, "examples": 1_600, "slurm": 661}
"""Lines of the other folders; of tools/ those of programs alone, of tests/ without what others published"""
ROOM_OF = {module: room for room, (_, _, modules) in ROOMS.items() for module in modules}
CONFIG_MAY_IMPORT = {"algo", "files", "schema"}
"""Fewer rooms than its floor allows. It reads what the algorithms' modules declare, without torch."""
ONLY_PACKAGES = {room: {"omegaconf", "hydra", "yaml"} for room in ("config", "schema")}
"""Rooms that may use these packages besides the standard library and no others"""
HOMES = {"ray": {"cluster"}, "sglang": {"rollout"}, "megatron": {"mcore", "cpu"}}
"""The only rooms that may import a package."""

ASKS_FOR_CUDA = re.compile(
    r"uses_transformer_engine\(|has_transformer_engine\(\)|cuda\.is_available\(\)|has_cuda\(\)|device\(\)\.type"
    r"|gpus_per_node (?:==|!=|>|<) 0|\b(?:if|not|and|or) [\w.]*\bgpus_per_node\b(?! [<>=!])"
    r"|isinstance\(.*\bGpu\)"
)
MOST_CUDA_CONDITIONS = 8
"""Outside of cpu/, whose room is there for what differs without CUDA. It falls to 8: device, layers, server command,
sender, dtype preset, placement and two to spare."""


def list_sources(*directories: str) -> list[Path]:
    return sorted(path for directory in directories for path in (ROOT / directory).rglob("*.py"))


def name_module(path: Path) -> str:
    """megarl/algo/algorithm.py -> megarl.algo.algorithm; a package's __init__.py has the package's name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find_imports(source: str, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import, also inside functions and by import_module("...")."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package and node.level == 1 else -node.level + is_package]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            # `from megarl.run import job` imports megarl.run.job.
            below = [f"{base}.{alias.name}" for alias in node.names]
            names = below if all(map(is_module, below)) else [base]
            yield from ((node.lineno, name) for name in names)
        elif isinstance(node, ast.Call) and (name := find_imported_name(node)):
            yield node.lineno, name


def is_module(name: str) -> bool:
    """Whether it is one of megarl's modules or rooms, and not a name inside one."""
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or path.is_dir()


def find_imported_name(call: ast.Call) -> str | None:
    """The module that import_module("...") or __import__("...") names; None for other calls."""
    function = ast.unparse(call.func).split(".")[-1]
    first = call.args[0] if call.args else None
    literal = isinstance(first, ast.Constant) and isinstance(first.value, str)
    return first.value if literal and function in ("import_module", "__import__") else None


def name_room(module: str) -> str | None:
    """megarl.algo.kl -> algo, megarl.config.errors -> schema; None for the package itself and for everything outside of
    it, and for a module that has no room its own name.
    """
    parts = module.split(".")
    if parts[0] != "megarl" or len(parts) < 2:
        return None
    return ROOM_OF.get(".".join(parts[1:3])) or ROOM_OF.get(parts[1]) or parts[1]


def explain_wrong_import(importer: str, imported: str) -> str | None:
    """Why module `importer` may not import module `imported`; None where it may."""
    room, target = name_room(importer), name_room(imported)
    if room is None:
        return None if imported in sys.stdlib_module_names else "importing one room must not load another"
    for name in (room, target):
        if name is not None and name not in ROOMS:
            return f"{name!r} has no place in ROOMS"
    if target is None:
        return explain_wrong_package(room, imported.split(".")[0])
    if room == target:
        return None
    if room == "config" and target not in CONFIG_MAY_IMPORT:
        return f"config may import only {sorted(CONFIG_MAY_IMPORT)} of megarl"
    if ROOMS[target][0] >= ROOMS[room][0]:
        return f"{room} may not import {target}: it does not stand on a lower floor"
    return None


def explain_wrong_package(room: str, package: str) -> str | None:
    if package in sys.stdlib_module_names or package == "megarl":
        return None
    allowed = ONLY_PACKAGES.get(room)
    if allowed is not None and package not in allowed:
        return f"{room} may import only {sorted(allowed)} and the standard library"
    homes = HOMES.get(package)
    if homes is not None and room not in homes:
        return f"only {sorted(homes)} may import {package}"
    return None


def report_problems(problems: Iterable[str]) -> None:
    found = list(problems)
    assert not found, "\n".join(found)


def in_standins(path: Path) -> bool:
    """Stand-ins replace other people's modules and are not modules of megarl."""
    return "standins" in path.relative_to(ROOT).parts


def test_imports_point_only_downward_and_packages_stay_in_their_rooms() -> None:
    report_problems(
        f"{path.relative_to(ROOT)}:{line}: imports {imported}: {reason}"
        for path in list_sources("megarl")
        if not in_standins(path)
        for line, imported in find_imports(path.read_text(), name_module(path), path.name == "__init__.py")
        if (reason := explain_wrong_import(name_module(path), imported))
    )


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("megarl.rollout.client", "megarl.mcore.model"),
        ("megarl.mcore.worker", "megarl.rollout.engine"),
        ("megarl.types", "megarl.config.load"),
        ("megarl.algo.algorithm", "megarl.task.data"),
        ("megarl.report.report", "megarl.config.load"),
        ("megarl.config.schema.root", "megarl.types"),
        ("megarl.config.errors", "megarl.config.load"),
        ("megarl.config.load", "megarl.models.families"),
        ("megarl.config.load", "torch"),
        ("megarl.config.schema.root", "torch"),
        ("megarl.trainer", "ray"),
        ("megarl.mcore.worker", "sglang"),
        ("megarl.rollout.client", "megatron.core"),
        ("megarl.signals", "megarl.run.job"),
        ("megarl.plan.memory", "megarl.run.inputs"),
        ("megarl.brandnew.thing", "torch"),
        ("megarl", "torch"),
    ],
)
def test_the_import_check_refuses(importer: str, imported: str) -> None:
    assert explain_wrong_import(importer, imported)


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("megarl.cluster.actors", "ray"),
        ("megarl.trainer", "megarl.run.checkpoint"),
        ("megarl.plan.doctor", "megarl.run.inputs"),
        ("megarl.algo.algorithm", "torch"),
        ("megarl.config.checks", "megarl.algo.objective"),
        ("megarl.config.load", "hydra.errors"),
        ("megarl.config.load", "difflib"),
    ],
)
def test_the_import_check_allows(importer: str, imported: str) -> None:
    assert explain_wrong_import(importer, imported) is None


def count_lines(files: Iterable[Path]) -> int:
    return sum(len(path.read_bytes().splitlines()) for path in files)


def test_every_room_keeps_to_its_budget_of_lines_and_the_package_to_its_ceilings() -> None:
    links = {path for path in PACKAGE.iterdir() if path.is_symlink()}
    skipped = {"__pycache__", "node_modules", "runs"}
    files = [
        path
        for path in sorted(PACKAGE.rglob("*"))
        if path.is_file() and not links.intersection(path.parents) and not skipped.intersection(path.parts)
    ]
    by_room: dict[str, list[Path]] = {room: [] for room in ROOMS}
    for path in files:
        parts = ("megarl", *path.relative_to(PACKAGE).with_suffix("").parts)
        room = name_room(".".join(parts)) if path.name != "__init__.py" else name_room(".".join(parts[:-1]))
        if room is not None:
            by_room[room].append(path)
    sizes = {room: count_lines(each) for room, each in by_room.items()}
    report_problems(
        f"{room}: {size} lines, its budget is {ROOMS[room][1]}" for room, size in sizes.items() if size > ROOMS[room][1]
    )
    assert count_lines(files) <= MOST_LINES
    assert len(files) + len(links) <= MOST_FILES
    for folder, most in MOST_BESIDE.items():
        beside = [
            path
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and not skipped.intersection(path.parts) and path.suffix != ".jinja"
        ]
        programs = [path for path in beside if path.suffix in {".py", ".sh"}]
        assert count_lines(programs if folder == "tools" else beside) <= most, folder


def test_the_import_finder_sees_every_form() -> None:
    source = """
import a.b, c
from d.e import f
from . import g
from .h import i
from ..j import k
from megarl import types
def inside():
    import lazy
    importlib.import_module("by.name")
"""
    found = {name for _, name in find_imports(source, "megarl.room.module")}
    expected = {"a.b", "c", "d.e", "megarl.room", "megarl.room.h", "megarl.j", "megarl.types", "lazy", "by.name"}
    assert found == expected
    in_package = {name for _, name in find_imports("from .h import i\nfrom ..j import k", "megarl.room", True)}
    assert in_package == {"megarl.room.h", "megarl.j"}


def test_the_page_on_the_architecture_says_what_each_folder_holds_and_no_folder_says_it_again() -> None:
    """An __init__.py is there only for what runs at the import of its folder."""
    page, problems = (ROOT / "docs" / "architecture.md").read_text(), []
    for directory in sorted({path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}):
        if in_standins(directory) or directory == PACKAGE / "rollout" / "models":
            continue
        init, name = directory / "__init__.py", f"`{directory.relative_to(PACKAGE)}/`"
        if name not in page:
            problems.append(f"docs/architecture.md: has no line for {name}")
        if init.exists() and not ast.parse(init.read_text()).body[1:]:
            problems.append(f"{init.relative_to(ROOT)}: runs nothing; docs/architecture.md says what the folder holds")
    report_problems(problems)


def test_no_module_is_a_drawer_for_odds_and_ends() -> None:
    drawers = {"utils", "util", "helpers", "misc", "common"}
    report_problems(
        f"{path.relative_to(ROOT)}: name it after what it holds"
        for path in list_sources("megarl", "tools", "tests")
        if path.stem in drawers or path.parent.name in drawers
    )


def test_no_module_gives_one_name_to_two_things() -> None:
    problems = []
    for path in list_sources("megarl", "tools"):
        targets = [
            target
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in getattr(node, "targets", [getattr(node, "target", None)])
        ]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        problems += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(set(names)) if names.count(name) > 1]
    report_problems(problems)


def test_few_lines_outside_of_cpu_ask_whether_there_is_cuda() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in list_sources("megarl")
        if path.relative_to(PACKAGE).parts[0] not in ("cpu", "tools", "examples")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if not line.startswith("def ") and ASKS_FOR_CUDA.search(line)
    ]
    assert len(found) <= MOST_CUDA_CONDITIONS, "\n".join(found)


def test_tests_live_only_under_tests() -> None:
    report_problems(
        f"{path.relative_to(ROOT)}: belongs under tests/"
        for path in list_sources("megarl", "tools")
        if path.stem.startswith("test_") or path.stem.endswith("_test") or path.stem == "conftest"
    )


def test_every_test_file_has_a_name_of_its_own() -> None:
    """pytest imports them by it."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    report_problems(name for name in sorted(set(names)) if names.count(name) > 1)


def find_unsafe_calls(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) of calls that run what a file or a message says."""
    evaluators = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "joblib.load"}
    picklers = {"pickle", "cloudpickle", "dill", "marshal"}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        # Writing a pickle runs nothing.
        if name in evaluators or (name.split(".")[0] in picklers and not name.endswith((".dump", ".dumps"))):
            yield node.lineno, name
        elif name == "torch.load" and options.get("weights_only") != "True":
            yield node.lineno, "torch.load without weights_only=True"
        elif options.get("trust_remote_code") == "True" or options.get("allow_pickle") == "True":
            yield node.lineno, f"{name} with {' '.join(options)}"


def test_nothing_is_unpickled_or_evaluated() -> None:
    report_problems(
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in list_sources("megarl", "tools")
        for line, what in find_unsafe_calls(path.read_text())
    )


@pytest.mark.parametrize(
    "source",
    [
        "eval(text)",
        "pickle.loads(data)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_the_safety_check_refuses(source: str) -> None:
    assert list(find_unsafe_calls(source))


def test_the_safety_check_allows_a_guarded_load() -> None:
    assert not list(find_unsafe_calls("torch.load(path, weights_only=True)\nmodel.eval()\npickle.dumps(data)"))


def test_no_run_reads_the_shared_folder_of_the_workplace() -> None:
    files = [*list_sources("megarl", "tools"), *(ROOT / "conf").rglob("*.yaml")]
    report_problems(
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if "../shared" in line or "/work/" in line
    )
