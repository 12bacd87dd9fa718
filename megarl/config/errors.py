"""The one error of a bad configuration, the search for the key the user meant, and objects of the user's own code by
name: in a file (`my_reward.py:score`) or a module (`package.module:name`).
"""

import hashlib
import importlib
import importlib.util
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

NEAR, NEAR_LEAF = 0.75, 0.85
"""Least similarity (difflib's ratio) of the whole key, and of its last part alone, to be taken for a misspelt one.
What is less alike is another word: of num_generations and train.num_iterations they are 0.69 and 0.83."""


class ConfigError(ValueError):
    """Each problem names the key, what was found and what would be right."""

    def __init__(self, problems: Sequence[str]):
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[tuple[str, ...]]]:
        """Keeps the problems apart where another process has raised it."""
        return type(self), (self.problems,)


def find_nearest_key(key: str, known: Iterable[str]) -> str | None:
    """The known dotted key most like `key`; one with the same last part wins over a merely similar one."""

    leaves = {name: name.rpartition(".")[2] for name in known}
    leaf = get_close_matches(key.rpartition(".")[2], leaves.values(), 1, NEAR_LEAF)
    same = [name for name in leaves if leaves[name] in leaf]
    near = get_close_matches(key, same or leaves, 1, 0.0 if same else NEAR)
    return near[0] if near else None


_SUFFIX = ".py"
_OTHERS = (Path(__file__).resolve().parents[1], Path(sysconfig.get_path("stdlib")))
"""megarl, and Python's own library, below which installed packages are"""


class DescribedError(Exception):
    """Stands for an exception of the user's code; its text says all, the type included."""


def load_named(key: str, path: str) -> object:
    """The object named "file.py:name" or "package.module:name".

    A file is read as a script is: relative to the current directory, and it may import the files beside it. A module is
    imported as Python finds it (PYTHONPATH, installed packages). Raises ConfigError naming `key` where it cannot be
    imported, with the line of the user's code that failed.
    """
    source, _, name = path.rpartition(":")
    if not source or not name:
        raise ConfigError([f"{key}: found {path!r}; it must be FILE.py:NAME or package.module:NAME"])
    if source.endswith(_SUFFIX) and not Path(source).expanduser().is_file():
        raise ConfigError([f"{key}: {source} does not exist (from {Path.cwd()}); it must be a file of Python"])
    try:
        target: object = _load_file(source) if source.endswith(_SUFFIX) else importlib.import_module(source)
    except Exception as error:  # A user's module can fail in any way while it is imported.
        why = describe_error(error, path)
        if isinstance(error, ModuleNotFoundError):
            why += "; a module must be installed or its folder be on PYTHONPATH, a file is named with its .py"
        raise ConfigError([f"{key}: found {path!r}; importing {source} failed: {why}"]) from error
    for part in name.split("."):
        if not hasattr(target, part):
            items, module = getattr(target, "__dict__", {}).items(), getattr(target, "__name__", "")
            own = [each for each, it in items if callable(it) and getattr(it, "__module__", None) == module]
            defined = ", ".join(each for each in own if not each.startswith("_"))
            raise ConfigError([f"{key}: found {path!r}; {source} has no {name}{defined and f', it has {defined}'}"])
        target = getattr(target, part)
    return target


def describe_error(error: BaseException, path: str = "") -> str:
    """An exception of the user's code in one line: its type and text, then the line of that code.

    path: what `load_named` loads, "file.py:name" or "package.module:name"; the last line in that file is shown, or
    where the error was not there, the last one that is neither megarl's nor an installed package's.
    """
    text = " ".join(str(error).split())
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({_show_line(error.filename, error.lineno or 0, error.text)})"
    source = path.rpartition(":")[0]
    # As frames have it: a file is loaded by its resolved name, a module by that of sys.path.
    file = getattr(sys.modules.get(source), "__file__", None) or ""
    own = Path(source).expanduser().resolve() if source.endswith(_SUFFIX) else Path(file)
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    chosen = [place for place in places if Path(place[0]) == own] or [place for place in places if _is_users(place[0])]
    return f"{what} ({_show_line(*chosen[-1])})" if chosen else what


def _load_file(source: str) -> object:
    """The module of a file, loaded once in a process."""
    file = Path(source).expanduser().resolve()
    # Its own name could be that of an installed package.
    name = f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    if str(file.parent) not in sys.path:
        # Last: a file beside it, such as random.py, must not take the place of a module of somebody else's.
        sys.path.append(str(file.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_users(file: str) -> bool:
    installed = "site-packages" in file or any(Path(file).is_relative_to(folder) for folder in _OTHERS)
    return not file.startswith("<") and not installed


def _show_line(file: str, number: int, text: str | None = None) -> str:
    """`my_reward.py, line 7: return 1 / 0`, the file as seen from the current directory."""
    source = (text or linecache.getline(file, number)).strip()
    shown = Path(file).relative_to(Path.cwd()) if Path(file).is_relative_to(Path.cwd()) else file
    return f"{shown}, line {number}: {source}" if source else f"{shown}, line {number}"
