"""README, CONTRIBUTING and docs name keys, choices, metrics and commands that exist; and the docs are short."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from metric_table import PLACEHOLDERS, find_metric, list_names

from megarl.cli import COMMANDS
from megarl.config.load import check_overrides
from megarl.config.names import find_old_name
from megarl.config.overrides import list_options
from megarl.config.schema.root import Config
from megarl.config.schema.task import SCHEMAS

ROOT = Path(__file__).resolve().parents[2]
README, CONTRIBUTING = ROOT / "README.md", ROOT / "CONTRIBUTING.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TEXTS = [README, CONTRIBUTING, *PAGES, *sorted((ROOT / "examples").rglob("*.md"))]
MOST_PAGES, MOST_WORDS, MOST_README_WORDS, MOST_CHANGELOG_LINES = 23, 40_000, 800, 50
OTHERS = {"migrating.md"}
"""They name the keys and metrics of other trainers"""


def count_words(path: Path) -> int:
    return len(path.read_text().split())


def test_the_docs_are_as_short_as_decided() -> None:
    assert len(PAGES) <= MOST_PAGES
    assert sum(map(count_words, PAGES)) <= MOST_WORDS
    assert count_words(README) <= MOST_README_WORDS
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= MOST_CHANGELOG_LINES


def test_another_page_links_to_each_page() -> None:
    def list_targets(path: Path) -> Iterator[Path]:
        for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", path.read_text()):
            yield (path.parent / target).resolve()

    linked = {target for path in TEXTS for target in list_targets(path) if target != path.resolve()}
    assert [path.name for path in PAGES if path not in linked] == []


def test_each_page_opens_with_whom_it_is_for() -> None:
    opened = {path.name: " ".join(path.read_text().split("\n\n")[1].split()) for path in PAGES}
    assert [
        name
        for name, text in opened.items()
        if not re.match(r"(This page is for|For) .*\b(at|in)\s+(its|the)\s+end\b", text, re.S | re.I)
    ] == []


def list_spans(path: Path) -> list[str]:
    """The text of each code span outside of blocks."""
    text = re.sub(r"^( *)```.*?^ *```", "", path.read_text(), flags=re.S | re.M)
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", text)]


def list_keys(schema: type = Config, prefix: str = "") -> Iterator[str]:
    """Every key of every choice, and the groups of keys."""
    for field in fields(schema):
        name, hint = f"{prefix}{field.name}", get_type_hints(schema)[field.name]
        yield name
        for each in (hint, *get_args(hint), *(SCHEMAS.get(name, {}).values() if not prefix else ())):
            if is_dataclass(each) and isinstance(each, type):
                yield from list_keys(each, f"{name}.")


KEYS = set(list_keys())
GROUPS = {field.name for field in fields(Config) if is_dataclass(get_type_hints(Config)[field.name])}
MODULES = sorted((ROOT / "megarl").rglob("*.py"))
FILE = re.compile(r"\.(py|yaml|json|jsonl|md|sh|log)$")
FREE = re.compile(
    r"(rollout\.sglang|model\.megatron|(data|environment|reward)\.options|train\.eval_sets|evaluate\.paths|\w+\.env)\."
)
"""Below these keys names are not ours"""


@pytest.mark.parametrize("path", [path for path in TEXTS if path.name not in OTHERS], ids=lambda path: path.name)
def test_every_key_that_a_text_names_exists(path: Path) -> None:
    wrong = []
    for span in list_spans(path):
        for word in span.split():
            found = re.fullmatch(r"\+{0,2}(([a-z_]+)\.[a-z_0-9.]*[a-z_0-9])(=.*)?", word)
            if found and found[2] in GROUPS and found[1] not in KEYS and not FREE.match(found[1] + "."):
                wrong.append(found[1])
    modules = {".".join(each.relative_to(ROOT / "megarl").with_suffix("").parts) for each in MODULES}
    assert [name for name in wrong if name not in modules and not FILE.search(name)] == []


@pytest.mark.parametrize("path", [path for path in TEXTS if path.name not in OTHERS], ids=lambda path: path.name)
def test_every_choice_of_a_group_that_a_text_names_exists(path: Path) -> None:
    own, wrong = set(re.findall(r"<!-- file: \S*?(\w+)\.yaml -->", path.read_text())), []
    for span in list_spans(path):
        for group, option in re.findall(r"(?:^| )([a-z_]+)=([a-z][a-z_0-9]*)(?= |$)", span):
            if (options := list_options(group)) and option not in {*options, *own} and group != "experiment":
                wrong.append(f"{group}={option}")
    assert wrong == []


@pytest.mark.parametrize("path", [path for path in TEXTS if path.name not in OTHERS], ids=lambda path: path.name)
def test_every_metric_that_a_text_names_exists(path: Path) -> None:
    groups = {name.split("/")[0] for name in list_names()} - {"heldout"}
    spans = {
        span for span in list_spans(path) if re.fullmatch(r"[a-z_]+/[\w{}]+", span) and span.split("/")[0] in groups
    }
    filled = {span: re.sub(r"\{(\w+)\}", lambda m: PLACEHOLDERS.get(m[1], ("", "x"))[1], span) for span in spans}
    folders = {str(each.relative_to(ROOT / "megarl")) for each in (ROOT / "megarl").rglob("*")}
    wrong = [span for span, name in filled.items() if find_metric(name) is None]
    assert [span for span in wrong if not span.endswith("/") and span not in folders] == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_command_within_a_sentence_composes(path: Path) -> None:
    for span in list_spans(path):
        words = span.split()
        if words[0] != "megarl" or len(words) == 1:
            continue
        assert words[1] in COMMANDS or words[1] in ("VERB", "COMMAND", "--help", "--version"), span
        overrides = [word for word in shlex.split(span)[2:] if "=" in word and not word.startswith("-")]
        if words[1] in ("train", "plan", "doctor", "data") and not re.search(
            r"[A-Z]{2,}|\.\.\.|experiment=|resume=|=my_", span
        ):
            check_overrides([text for text in overrides if "," not in text])


def test_renamed_keys_are_named_nowhere() -> None:
    """An old name of ours is answered by the program alone."""
    texts = [path for path in TEXTS if path.name not in OTHERS]
    words = {(path.name, word) for path in texts for span in list_spans(path) for word in span.split()}
    old = [(page, word) for page, word in words if "." in word and find_old_name(word.partition("=")[0])]
    assert old == []
