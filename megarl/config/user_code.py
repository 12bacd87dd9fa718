"""Objects of the user's own code, by name: in a file (`my_reward.py:score`) or a module (`package.module:name`)."""

import hashlib
import importlib
import importlib.util
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from megarl.config.errors import ConfigError

_SUFFIX = ".py"


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
    try:
        target: object = _load_file(key, source) if source.endswith(_SUFFIX) else importlib.import_module(source)
    except ConfigError:
        raise
    except Exception as error:  # A user's module can fail in any way while it is imported.
        raise ConfigError(
            [f"{key}: found {path!r}; importing {source} failed: {_explain_import(error, path)}"]
        ) from error
    for part in name.split("."):
        if not hasattr(target, part):
            defined = ", ".join(_list_names(target))
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
    own = find_file(path)
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    chosen = [place for place in places if Path(place[0]) == own] or [place for place in places if _is_users(place[0])]
    return f"{what} ({_show_line(*chosen[-1])})" if chosen else what


def find_file(path: str) -> Path | None:
    """The file of what `load_named` loads from this path; None for a module that it has not loaded."""
    source = path.rpartition(":")[0]
    if source.endswith(_SUFFIX):
        return Path(source).expanduser().resolve()
    file = getattr(sys.modules.get(source), "__file__", None)
    return None if file is None else Path(file)


_OTHERS = (Path(__file__).resolve().parents[1], Path(sysconfig.get_path("stdlib")))
"""megarl, and Python's own library, below which installed packages are"""


def _load_file(key: str, source: str) -> ModuleType:
    """The module of a file, loaded once in a process. Raises ConfigError where there is no such file."""
    name, file = _name_module(source), Path(source).expanduser().resolve()
    if name in sys.modules:
        return sys.modules[name]
    if not file.is_file():
        raise ConfigError([f"{key}: {source} does not exist (from {Path.cwd()}); it must be a file of Python"])
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


def _name_module(source: str) -> str:
    """my_reward.py -> my_reward_1f3a: its own name could be that of an installed package."""
    file = Path(source).expanduser().resolve()
    return f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"


def _list_names(target: object) -> Iterator[str]:
    """What a module defines itself."""
    if isinstance(target, ModuleType):
        for name, value in vars(target).items():
            if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == target.__name__:
                yield name


def _explain_import(error: Exception, path: str) -> str:
    text = describe_error(error, path)
    if isinstance(error, ModuleNotFoundError):
        text += "; a module must be installed or its folder be on PYTHONPATH, a file is named with its .py"
    return text


def _is_users(file: str) -> bool:
    return (
        not file.startswith("<")
        and not any(Path(file).is_relative_to(folder) for folder in _OTHERS)
        and ("site-packages" not in file)
    )


def _show_line(file: str, number: int, text: str | None = None) -> str:
    """`my_reward.py, line 7: return 1 / 0`, the file as seen from the current directory."""
    source = (text or linecache.getline(file, number)).strip()
    path = Path(file)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}, line {number}: {source}" if source else f"{shown}, line {number}"
