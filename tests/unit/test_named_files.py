"""Files of this repository that comments, docstrings, messages and docs name exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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
