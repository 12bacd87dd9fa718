"""README.md, CONTRIBUTING.md, CHANGELOG.md and docs/ as texts: links, lengths of lines, generated parts, and metrics.md
against the code that logs; files that comments, docstrings, messages and docs name exist.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from metric_table import PLACEHOLDERS, find_metric, list_names
from tool_loading import load_tool

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
MOST_WORDS_OF_README = 800
LONGEST_LINE = 120


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_to_a_file_and_a_heading(file: Path) -> None:
    for text, target in re.findall(
        r"\[([^\]]*)\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", file.read_text(), flags=re.S)
    ):
        if target.startswith("http"):
            continue
        path, _, heading = unquote(target).partition("#")
        found = (file.parent / path).resolve() if path else file
        assert found.exists(), f"[{text}]({target})"
        assert not heading or heading in list_anchors(found), f"[{text}]({target})"


def list_anchors(file: Path) -> set[str]:
    """The anchors that GitHub makes of the headings, and those written as <a name>."""
    text = file.read_text()
    heads = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
    return slugs | set(re.findall(r'<a name="([^"]+)">', text))


def test_lines_are_short_but_for_tables_and_blocks() -> None:
    for file in TEXTS:
        text = re.sub(r"^( *)```.*?^ *```", "", file.read_text(), flags=re.S | re.M)
        long = [line for line in text.splitlines() if len(line) > LONGEST_LINE and not line.startswith("|")]
        assert not long, f"{file.relative_to(ROOT)}: {long[0]}"


def test_the_generated_pages_and_parts_of_pages_are_current() -> None:
    for page, render in load_tool("docs/generate.py").PAGES.items():
        assert page.read_text() == render(), "python tools/docs/generate.py"


def test_the_numbers_of_the_prompt_in_the_architecture_agree_with_its_formulas() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = [line.strip(" |").split(" | ") for line in text.splitlines() if re.match(r" *\| \d+ \| `", line)]
    (lambda_,) = re.findall(r"clip\(1 - 1/.*?, 1\) = ([\d.]+)\.", text)
    (reward,) = {float(row[5]) for row in rows}
    assert len(rows) == 4
    advantage, value = 0.0, reward
    for row in reversed(rows):
        own = float(row[3])
        advantage = value - own + float(lambda_) * advantage
        assert float(row[4]) == pytest.approx(advantage, abs=2e-4), f"token {row[0]}"
        value = own


NAMED_PATH = re.compile(r"(?<![\w./$}-])(?:megarl|tools|conf|tests|slurm)/[\w./-]*\.(?:py|yaml|sh)\b")


def test_every_file_that_a_comment_a_docstring_or_a_page_names_exists() -> None:
    """A word in capitals is a placeholder."""
    missing = [
        f"{path.relative_to(ROOT)}:{number}: names {name}, which does not exist"
        for directory in ("megarl", "tools", "conf", "tests", "slurm", "docs")
        for path in sorted((ROOT / directory).rglob("*"))
        if path.is_file() and path != Path(__file__)
        if path.suffix in {".py", ".yaml", ".sh", ".toml", ".md"} or path.name == "Dockerfile"
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for name in NAMED_PATH.findall(line)
        if not any(part.isupper() for part in re.split(r"[/._]", name)) and not (ROOT / name).is_file()
    ]
    assert not missing, "\n".join(missing)


PACKAGE = ROOT / "megarl"
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
    found |= {name for name in find_names((PACKAGE / "report/record.py").read_text()) if name.startswith("derived/")}
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
