"""README.md, CONTRIBUTING.md, CHANGELOG.md and docs/ as texts: links, lengths of lines, and generated parts; files that
comments, docstrings, messages and docs name exist.
"""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from tool_loading import load_tool

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
LONGEST_README = 150
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


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= LONGEST_README


def test_lines_are_short_but_for_tables_and_blocks() -> None:
    for file in TEXTS:
        text = re.sub(r"^( *)```.*?^ *```", "", file.read_text(), flags=re.S | re.M)
        long = [line for line in text.splitlines() if len(line) > LONGEST_LINE and not line.startswith("|")]
        assert not long, f"{file.relative_to(ROOT)}: {long[0]}"


def test_the_configuration_and_the_objectives_are_current() -> None:
    tool = load_tool("docs/generate.py")
    assert tool.CONFIGURATION.read_text() == tool.render_configuration(), "python tools/docs/generate.py"
    assert tool.ALGORITHMS.read_text() == tool.render_algorithms(), "python tools/docs/generate.py"


def test_the_numbers_of_the_tutorial_agree_with_its_formulas() -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text()
    table = text[text.index("| t | id | token |") : text.index("`rollout_logprob` comes from")]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if re.match(r"\| \d", line)]
    (lambda_,) = re.findall(r"clip\(1 - 1/.*?, 1\) =\s+([\d.]+)\.", text)
    (reward,) = {float(row[7]) for row in rows}
    advantage, value = 0.0, reward
    for step, row in enumerate(reversed(rows[-8:])):  # those before them are not shown to the end
        own = float(row[5])
        advantage = value - own + float(lambda_) * advantage
        assert float(row[6]) == pytest.approx(advantage, abs=2e-4), f"token {len(rows) - step}"
        value = own


NAMED_PATH = re.compile(r"(?<![\w./$}-])(?:megarl|tools|conf|tests|slurm)/[\w./-]*\.(?:py|yaml|sh)\b")


def test_every_file_that_a_comment_a_docstring_or_a_page_names_exists() -> None:
    """A word in capitals is a placeholder."""
    missing = [
        f"{path.relative_to(ROOT)}:{number}: names {name}, which does not exist"
        for directory in ("megarl", "tools", "conf", "tests", "slurm", "docs")
        for path in sorted((ROOT / directory).rglob("*"))
        if path.is_file() and path.suffix in {".py", ".yaml", ".sh", ".toml", ".md", ""} and path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        for name in NAMED_PATH.findall(line)
        if not any(part.isupper() for part in re.split(r"[/._]", name)) and not (ROOT / name).is_file()
    ]
    assert not missing, "\n".join(missing)
