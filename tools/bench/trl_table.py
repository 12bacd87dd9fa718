"""The table of tools/bench/against_trl.py, from the files of its cells."""

import json
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.report.text import fill_block

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "against-trl.md"
BEGIN = "<!-- begin table: made by tools/bench/against_trl.py -->\n"
END = "<!-- end table -->"
GOAL = 2.0
PHASES = ("rollout", "experience", "update", "sync")


def find_medians(result: Mapping[str, Any], side: str) -> dict[str, float]:
    rows = [each[side] for each in result["iterations"]]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0] if name != "lengths"}


def compute_ratio(result: Mapping[str, Any]) -> float:
    """TRL's seconds over megarl's, the median of neighbouring iterations."""
    pairs = result["iterations"]
    return float(statistics.median(pair["trl"]["seconds"] / pair["megarl"]["seconds"] for pair in pairs))


def find_costly(trl: Mapping[str, float], ours: Mapping[str, float]) -> tuple[str, float]:
    """The phase whose seconds are most beyond the GOAL-th part of TRL's counterpart, and by how many.

    Generation is the counterpart of the rollout, training that of the update; the others have none.
    """
    excess = {
        "rollout": ours["rollout"] - trl["generation"] / GOAL,
        "update": ours["update"] - trl["training"] / GOAL,
        "experience": ours["experience"],
        "sync": ours["sync"],
        "rest": ours["seconds"] - sum(ours[phase] for phase in PHASES),
    }
    name = max(excess, key=lambda phase: excess[phase])
    return name, excess[name]


def format_row(result: Mapping[str, Any]) -> str:
    trl, ours, ratio = find_medians(result, "trl"), find_medians(result, "megarl"), compute_ratio(result)
    num_samples = result["num_prompts"] * result["num_responses"]
    size = f"{result['num_prompts']} x {result['num_responses']} x {result['response_length']}"
    costly = "" if ratio >= GOAL else "{}, {:.1f} s too many".format(*find_costly(trl, ours))
    cells = [
        f"{size}, {result['dtype']}",
        *(f"{num_samples / side['seconds']:.2f}" for side in (trl, ours)),
        f"{ratio:.2f}",
        *(f"{trl[part]:.1f}" for part in ("generation", "training")),
        *(f"{ours[phase]:.1f}" for phase in PHASES),
        costly,
    ]
    return f"| {' | '.join(cells)} |"


def wrap_item(text: str) -> str:
    """An item of a list in lines of at most 120 characters."""
    return textwrap.fill(text, 120, subsequent_indent="  ", break_on_hyphens=False)


def format_conditions(result: Mapping[str, Any]) -> str:
    hardware, number = result["hardware"], len(result["iterations"])
    counted = f"{number} iteration{'s' if number > 1 else ''} of each side"
    return wrap_item(
        f"- {result['num_prompts']} x {result['num_responses']} x {result['response_length']}, {result['dtype']}:"
        f" {result['date']}, {hardware['cpu']}, {result['threads']} of {hardware['cores']} cores,"
        f" {counted}, prompts of {result['prompt_tokens']:.0f} tokens, load"
        f" average of the last 15 minutes {result['load_average']:.1f}"
    )


def format_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row per cell, and below it on what each was measured."""
    lines = [
        "| prompts x responses x tokens | TRL samples/s | megarl samples/s | ratio | TRL: generation s | training s"
        " | megarl: rollout s | experience s | update s | sync s | below 2 by |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(format_row(result) for result in results),
        "",
        *(format_conditions(result) for result in results),
        "",
    ]
    for side, found in (("TRL", [r["trl"]["versions"] for r in results]), ("megarl", [r["megarl"] for r in results])):
        versions = sorted({f"{name} {version}" for each in found for name, version in each.items()})
        lines.append(wrap_item(f"- {side}: {', '.join(versions)}"))
    if results and not any(result["trl"]["has_ppo"] for result in results):
        lines.append("- PPO: this release of TRL has no PPO trainer, and none with a value model, to compare with.")
    return "\n".join(lines) + "\n"


def write_page(directory: Path, cells: Sequence[str]) -> None:
    """Put the table of all finished cells into the page: `cells` in their order, then others."""
    found = {file.stem: json.loads(file.read_text()) for file in sorted(directory.glob("*.json"))}
    order = [name for name in cells if name in found] + [name for name in found if name not in cells]
    PAGE.write_text(
        fill_block(PAGE.read_text(), BEGIN, END, f"\n{format_table([found[n] for n in order])}\n", str(PAGE))
    )
