"""docs/metrics.md, the list of every metric that a run logs, as the tests read it."""

import re
from functools import cache
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
PLACEHOLDERS = {
    "quarter": ("0_25|25_50|50_75|75_100", "0_25"),
    "quartile": ("[1-4]", "1"),
    "state": ("first|middle", "first"),
    "baseline": ("group|batch", "group"),
    "set": (r"[^{}\s/]+", "hard"),
    "trained": ("policy|critic", "policy"),
    "role": ("policy|critic|reference", "policy"),
    "name": (r"[^{}\s]+", "anything"),
}
"""What may stand for each (a regular expression), and an example"""


@cache
def list_names() -> tuple[str, ...]:
    """The names before the unit of each entry; those without placeholders first, those that match anything last."""
    before = PAGE.read_text(encoding="utf-8").partition("## In verl and TRL")[0]
    heads = re.findall(r"^- (`[^(]+`) \(", before, re.MULTILINE)
    names = [name for head in heads for name in re.findall(r"`([\w{}]+/[\w{}/]+)`", head)]
    return tuple(sorted(names, key=lambda name: ("{" in name, "{name}" in name, -name.count("/"))))


def build_pattern(name: str) -> str:
    parts = re.split(r"\{(\w+)\}", name)
    return "".join(f"(?:{PLACEHOLDERS[part][0]})" if i % 2 else re.escape(part) for i, part in enumerate(parts))


def find_metric(name: str) -> str | None:
    """The most specific entry for a logged name; None: it is not in the list."""
    return next((entry for entry in list_names() if re.fullmatch(build_pattern(entry), name)), None)
