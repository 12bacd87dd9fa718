"""The rules of the code base that a reader relies on: who imports whom, what each room may use, sizes."""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megarl"

LAYERS = (
    {"config.errors", "cpu.dtype", "config.run_name"},
    {"config.schema", "config.user_code"},
    {"guard", "files", "ports", "signals", "timeline"},
    {"types"},
    {"algo", "models"},
    {"config"},
    {"interfaces", "environment", "run.limits"},
    {"task", "report"},
    {"cpu"},
    {"mcore", "rollout"},
    {"sync"},
    {"cluster", "run.inputs", "run.command", "run.fleet", "run.resume", "run.ended"},
    {"run.checkpoint"},
    {"experience"},
    {"trainer", "plan", "sweep"},
    {"run.job", "run.evaluation"},
    {"run.attempts"},
    {"evaluate", "serve", "api"},
    {"train", "cli"},
)
"""Rooms from the bottom up; of a room that stands both below and above others, its modules. A room imports itself and
rooms of lower layers, never one of its own layer."""
LAYER_OF = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}
SCHEMA = {"config.schema", "config.errors", "cpu.dtype", "config.run_name", "config.user_code"}
ONLY_ROOMS = {
    "report": {"report", "config", "types", "files", "timeline", *SCHEMA},
    "algo": {"algo", "types", "files", *SCHEMA},
    # A check of the configuration reads what the algorithms' modules declare, without torch.
    "config": {"config", "algo", "files", *SCHEMA},
    "models": {"models", *SCHEMA},
    "types": {"types"},
}
"""Rooms that may import fewer of megarl's rooms than their layer allows."""
ONLY_PACKAGES: dict[str, set[str]] = {room: {"omegaconf", "hydra", "yaml"} for room in ("config", *SCHEMA)}
"""Rooms that may use these packages besides the standard library and no others."""
HOMES = {
    "ray": {"cluster"},
    "sglang": {"rollout"},
    "megatron": {"mcore", "cpu"},
}
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
    """megarl/algo/rewards.py -> megarl.algo.rewards; a package's __init__.py has the package's name."""
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
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def find_imported_name(call: ast.Call) -> str | None:
    """The module that import_module("...") or __import__("...") names; None for other calls."""
    function = ast.unparse(call.func).split(".")[-1]
    first = call.args[0] if call.args else None
    literal = isinstance(first, ast.Constant) and isinstance(first.value, str)
    return first.value if literal and function in ("import_module", "__import__") else None


def name_room(module: str) -> str | None:
    """megarl.algo.kl -> algo, megarl.run.job -> run.job; None for the package itself and for everything outside it."""
    parts = module.split(".")
    if parts[0] != "megarl" or len(parts) < 2:
        return None
    by_module = ".".join(parts[1:3])
    return by_module if by_module in LAYER_OF else parts[1]


def explain_wrong_import(importer: str, imported: str) -> str | None:
    """Why module `importer` may not import module `imported`; None where it may."""
    room, target = name_room(importer), name_room(imported)
    if room is None:
        return None if imported in sys.stdlib_module_names else "importing one room must not load another"
    if room not in LAYER_OF:
        # The __init__ of a room whose modules stand in several layers imports nothing.
        is_split = any(name.startswith(f"{room}.") for name in LAYER_OF)
        return None if is_split and target == room else f"room {room!r} has no place in LAYERS"
    if target is None:
        return explain_wrong_package(room, imported.split(".")[0])
    if room == target:
        return None
    if target not in LAYER_OF:
        return f"room {target!r} has no place in LAYERS"
    if target not in ONLY_ROOMS.get(room, {target}):
        return f"{room} may import only {sorted(ONLY_ROOMS[room] - {room})} of megarl"
    if LAYER_OF[target] >= LAYER_OF[room]:
        return f"{room} may not import {target}: it does not stand in a lower layer"
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
        ("megarl.types", "megarl.interfaces"),
        ("megarl.algo.rewards", "megarl.task.data"),
        ("megarl.report.report", "megarl.interfaces"),
        ("megarl.config.schema.run", "megarl.types"),
        ("megarl.config.schema.run", "megarl.config.load"),
        ("megarl.algo.rewards", "megarl.config.load"),
        ("megarl.config.load", "megarl.types"),
        ("megarl.config.load", "torch"),
        ("megarl.config.schema.run", "torch"),
        ("megarl.trainer", "ray"),
        ("megarl.mcore.worker", "ray.util"),
        ("megarl.mcore.worker", "sglang"),
        ("megarl.rollout.client", "megatron.core"),
        ("megarl.signals", "megarl.run.job"),
        ("megarl.trainer", "megarl.run.attempts"),
        ("megarl.run.brandnew", "megarl.signals"),
        ("megarl.brandnew.thing", "torch"),
        ("megarl", "torch"),
    ],
)
def test_the_import_check_refuses(importer: str, imported: str) -> None:
    assert explain_wrong_import(importer, imported)


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("megarl.cluster.workers", "ray"),
        ("megarl.trainer", "megarl.report.report"),
        ("megarl.trainer", "megarl.signals"),
        ("megarl.run.attempts", "megarl.run.job"),
        ("megarl.algo.rewards", "megarl.algo.losses"),
        ("megarl.algo.rewards", "torch"),
        ("megarl.config.checks", "megarl.algo.registry"),
        ("megarl.config.load", "hydra.errors"),
        ("megarl.config.load", "difflib"),
    ],
)
def test_the_import_check_allows(importer: str, imported: str) -> None:
    assert explain_wrong_import(importer, imported) is None


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


def test_every_room_is_a_package_whose_init_says_in_one_line_what_it_is() -> None:
    problems = []
    for directory in sorted(path.parent for path in PACKAGE.rglob("*.py")):
        if in_standins(directory):
            continue
        init = directory / "__init__.py"
        docstring = ast.get_docstring(ast.parse(init.read_text())) if init.exists() else None
        if not docstring or len(docstring.splitlines()) != 1:
            problems.append(f"{init.relative_to(ROOT)}: needs a one-line docstring")
    report_problems(dict.fromkeys(problems))


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
