"""Reads answers.txt: pairs of (expected answer, response) under reward.answer=final."""

from pathlib import Path


def _read() -> dict[str, list[tuple[str, str]]]:
    pairs: dict[str, list[tuple[str, str]]] = {}
    half = "HEAD"
    for row in Path(__file__).with_suffix(".txt").read_text().replace("↩\n", "").splitlines():
        if row.startswith("= "):
            half = row.split()[1]
        elif half != "HEAD":
            gold, _, responses = row.partition(" ⇒ ")
            for each in responses.split(" ¦ "):
                text = each[1:] if each.startswith("@") else f"\\boxed{{{each}}}"
                text = text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text
                pairs.setdefault(half, []).append((gold, text.replace("⏎", "\n")))
    return pairs


RIGHT, WRONG = _read().values()
