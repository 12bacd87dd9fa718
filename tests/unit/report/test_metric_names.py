"""docs/metrics.md against the code that logs; tests/unit/loop checks it against whole runs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from metric_table import PLACEHOLDERS, find_metric, list_names

PACKAGE = Path(__file__).resolve().parents[3] / "megarl"
READERS = tuple(
    f"report/{name}.py"
    for name in ("sinks", "terminal", "metrics", "charts", "page", "signs", "compare", "record", "text")
)
"""Files that name metrics, or axes, without logging them"""
GROUPS = {name.split("/")[0] for name in list_names()}


def find_names(source: str) -> Iterator[str]:
    """Regular expressions of the strings in `source` that look like a metric's name, and of the phases it times.

    An f-string's values match anything.
    """
    tree = ast.parse(source)
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [re.escape(p.value) if isinstance(p, ast.Constant) else r"[\w/]+" for p in node.values]
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.escape(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and (called := node.func.attr.lstrip("_")) in ("phase", "mark"):
                yield re.escape({"phase": "time/", "mark": "sync/seconds_"}[called] + str(first.value))


def list_logged() -> set[str]:
    sources = [path for path in PACKAGE.rglob("*.py") if not str(path).endswith(READERS)]
    assert len(sources) > 60
    found = {name for path in sources for name in find_names(path.read_text())}
    # `f"{name}/{part}"` would match everything.
    return {name for name in found if re.search(r"[a-z]", name.replace(r"[\w/]+", "")) and "/" in name}


def fill(name: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: PLACEHOLDERS[found[1]][1], name)


def test_every_metric_of_the_table_is_logged_somewhere() -> None:
    logged = list_logged()
    # What a user names is no evidence for a name of ours.
    any_name = {name for name in logged if re.fullmatch(r"\w+/" + re.escape(r"[\w/]+"), name)}
    closed, every = ([re.compile(name) for name in names] for names in (logged - any_name, logged))

    def is_logged(name: str) -> bool:
        # The same numbers as of training, of the held-out prompts.
        own = name.removeprefix("heldout/") if name.startswith("heldout/environment/") else name
        return any(pattern.fullmatch(fill(own)) for pattern in (every if "{name}" in name else closed))

    assert not [name for name in list_names() if not is_logged(name)]


def test_every_name_that_the_code_logs_is_in_the_table() -> None:
    plain = [name.replace("\\", "") for name in list_logged() if not re.search(r"[\[ .]", name.replace("\\.", "."))]
    names = [name for name in plain if name.split("/")[0] in GROUPS and re.fullmatch(r"\w+/\w+", name)]
    assert len(names) > 50
    beginnings = {"advantage/signal_frac"}
    assert not [name for name in names if find_metric(name) is None and name not in beginnings]


def test_the_table_is_consistent() -> None:
    names = list_names()
    assert len(set(names)) == len(names) > 100
    assert [find_metric(fill(name)) for name in names] == list(names)
    assert not [name for name in ("debug/other", "critic/ev_at_0_10", "critic/value_first_q5") if find_metric(name)]
