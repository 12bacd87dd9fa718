"""docs/results/claims.md and its pictures, from finished runs alone."""

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from html import escape

from claims_bench.runs import Run
from claims_bench.specs import Claim, Prediction
from claims_bench.verdicts import MEASURES, Outcome, is_confirmed, judge_claim, judge_prediction, take_last
from megarl.report.svg import HEIGHT, WIDTH, Curve, draw_lines
from megarl.report.text import fill_block

BEGIN = "<!-- begin claims: made by tools/bench/claims.py -->\n"
END = "<!-- end claims -->"
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
ROW = 15
ESCAPED = "\\|"
"""A sign that would end the cell of a table"""
Runs = Mapping[tuple[str, int], Run]
"""By arm and seed"""


def fill_page(page: str, content: str) -> str:
    """The page with this between its marks. Raises ValueError where they are missing."""
    return fill_block(page, BEGIN, END, f"\n{content}\n", "docs/results/claims.md")


def judge_all(claim: Claim, runs: Runs) -> list[Outcome]:
    return [judge_prediction(prediction, runs, claim.seeds) for prediction in claim.predictions]


def format_page(claims: Mapping[str, Claim], runs: Mapping[str, Runs], real: Mapping[str, Run]) -> str:
    """Markdown: the verdicts of all claims, then each claim. runs, real: by claim; real has the cross-checks."""
    lines = ["| claim | verdict | source |", "| --- | --- | --- |"]
    for name, claim in claims.items():
        verdict = judge_claim(claim, judge_all(claim, runs.get(name, {}))).value
        lines.append(f"| [{claim.title}](#{name.replace('_', '-')}) | {verdict} | {claim.source} |")
    parts = ["\n".join(lines)]
    parts += [format_claim(claim, runs.get(name, {}), real.get(name)) for name, claim in claims.items()]
    return "\n\n".join(parts) + "\n"


def format_claim(claim: Claim, runs: Runs, real: Run | None) -> str:
    outcomes = judge_all(claim, runs)
    parts = [
        f"### {claim.name.replace('_', '-')}",
        wrap(f"**{claim.title}: {judge_claim(claim, outcomes).value}.** Source: {claim.source}."),
        wrap(claim.task),
        wrap(describe_loop(claim, runs, real)),
    ]
    if runs:
        parts += [f"![share of right answers against samples](../../tools/bench/claims/{claim.name}.svg)"]
    parts += [format_predictions(claim.predictions, outcomes)]
    if runs:
        parts += [format_arms(claim, runs)]
    return "\n\n".join(parts)


def wrap(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def describe_loop(claim: Claim, runs: Runs, real: Run | None) -> str:
    """Which loop ran, and what the cross-check with the real one says."""
    seeds = ", ".join(map(str, claim.seeds))
    if claim.loop == "real":
        return f"Real loop (Megatron-Core, SGLang, Ray). Seeds {seeds}."
    text = f"In one process: the product's loop, targets and losses over the tiny model in plain torch. Seeds {seeds}. "
    arm = claim.cross_checked
    own = [run for (name, _), run in runs.items() if name == arm]
    if real is None or not own:
        return f"{text}Cross-check of `{arm}` with the real loop: not run."
    ends = [take_last(run.right) for run in own]
    word = "agrees" if is_confirmed(real, own) else "does not agree"
    return (
        f"{text}Cross-check of `{arm}` with the real loop, seed {real.seed}: right at the end"
        f" {take_last(real.right):.2f}, in one process {min(ends):.2f} to {max(ends):.2f}: {word}."
    )


def format_predictions(predictions: Sequence[Prediction], outcomes: Sequence[Outcome]) -> str:
    """Markdown: a row per prediction; those in brackets do not decide."""
    lines = [
        "| prediction | number | margin | expected, because | difference, 95% interval | verdict |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for prediction, outcome in zip(predictions, outcomes, strict=True):
        text = prediction.text if prediction.decides else f"({prediction.text})"
        number = f"{prediction.number}: {prediction.high} - {prediction.low}"
        difference = outcome.difference
        found = "" if difference is None else f"{difference.mean:.3f}, {difference.low:.3f} to {difference.high:.3f}"
        why = f"{prediction.expected}: {prediction.why}"
        cells = (text, number, f"{prediction.margin:g}", why, found, outcome.verdict.value)
        lines.append(f"| {' | '.join(cell.replace('|', ESCAPED) for cell in cells)} |")
    return "\n".join(lines)


def format_arms(claim: Claim, runs: Runs) -> str:
    """Markdown: the numbers that the predictions are about, of each arm and seed."""
    names = list(dict.fromkeys(["right at the end", *(prediction.number for prediction in claim.predictions)]))
    lines = [f"| arm | seeds | {' | '.join(names)} |", f"| --- | --- |{' --- |' * len(names)}"]
    for arm in claim.arms:
        found = [runs[arm, seed] for seed in claim.seeds if (arm, seed) in runs]
        if found:
            cells = [", ".join(f"{MEASURES[name](run):.2f}" for run in found) for name in names]
            lines.append(f"| {arm} | {', '.join(str(run.seed) for run in found)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw_claim(arms: Sequence[str], runs: Runs, labels: Mapping[str, str] | None = None) -> str:
    """A standalone SVG: the share of right answers against the responses generated. The mean of the arm's seeds is a
    thick line, each seed a thin one."""
    curves, drawn = [], [arm for arm in arms if any(name == arm for name, _ in runs)]
    for group, arm in enumerate(drawn):
        found = [run for (name, _), run in sorted(runs.items()) if name == arm]
        columns = list(zip(*(run.right for run in found), strict=False))
        curves += [
            Curve(f"{arm} {run.seed}", arm, group, list(zip(run.samples, run.right, strict=True))) for run in found
        ]
        means = [statistics.fmean(column) for column in columns]
        curves.append(Curve(f"{arm} mean", arm, group, list(zip(found[0].samples, means, strict=False))))
    legend = [
        f'<text x="{46 + 150 * (i % 2)}" y="{HEIGHT + 8 + ROW * (i // 2)}" fill="{COLOURS[i % 8]}">'
        f"{escape((labels or {}).get(arm, arm))}</text>"
        for i, arm in enumerate(drawn)
    ]
    style = (
        "text{font:11px sans-serif}.tick{fill:#777}.grid,.axis{stroke:#ccc}polyline{fill:none}.hit,.end{display:none}"
    )
    for i in range(len(drawn)):
        colour = COLOURS[i % 8]
        style += f".g{i} .line{{stroke:{colour};stroke-width:.6;opacity:.5}}"
        style += f'.g{i}[data-run$="mean"] .line{{stroke:{colour};stroke-width:2.2;opacity:1}}'
    height = HEIGHT + ROW * ((len(drawn) + 1) // 2) + 4
    svg = draw_lines(curves).replace(
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img">',
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height:g}" width="{2 * WIDTH}" role="img">'
        f"<style>{style}</style>",
    )
    return svg.removesuffix("</svg>") + "".join(legend) + "</svg>\n"
