"""Files of this repository that comments, docstrings and messages name exist."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED_PATH = re.compile(r"(?<![\w./$}-])(?:megarl|tools|conf|tests|slurm)/[\w./-]*\.(?:py|yaml|sh)\b")


def find_missing_paths(text: str) -> Iterator[tuple[int, str]]:
    """(line, path) of the files that a text names and that do not exist; a word in capitals is a placeholder."""
    for number, line in enumerate(text.splitlines(), start=1):
        for path in NAMED_PATH.findall(line):
            if not any(part.isupper() for part in re.split(r"[/._]", path)) and not (ROOT / path).is_file():
                yield number, path


def test_every_file_that_a_comment_or_docstring_names_exists() -> None:
    suffixes = {".py", ".yaml", ".sh", ".toml", ""}
    missing = [
        f"{path.relative_to(ROOT)}:{number}: names {name}, which does not exist"
        for directory in ("megarl", "tools", "conf", "tests", "slurm")
        for path in sorted((ROOT / directory).rglob("*"))
        if path.is_file() and path.suffix in suffixes and path != Path(__file__)
        for number, name in find_missing_paths(path.read_text())
    ]
    assert not missing, "\n".join(missing)


def test_the_path_check_finds_a_missing_file_and_passes_over_placeholders() -> None:
    text = "see megarl/train.py\n# and megarl/gone.py, conf/algo/NAME.yaml\nhttps://example.org/megarl/else.py"
    assert list(find_missing_paths(text)) == [(2, "megarl/gone.py")]
