"""The figures of the documentation: curves of runs, from docs/results/curves.jsonl to docs/figures/FIGURE.svg.

    python tools/docs/figures.py             draw them
    python tools/docs/figures.py --check     exit code 1, naming each figure that is not current
    python tools/docs/figures.py --add RUN_DIR FIGURE LABEL "PANEL=METRIC" ...

--add takes the curves of a run into the data, one for each panel, which replace those of the same names, and draws.
A line of the data is a curve: {"figure", "panel", "label", "metric", "command", "points": [[iteration, value], ...]}.
Figures, panels and labels are drawn in the order in which the data first names them.
"""

import argparse
import json
import math
import shlex
import sys
from html import escape
from pathlib import Path
from typing import Any

from megarl.files import RUN_FILE, load_json_object
from megarl.report.charts import CRITIC, HEIGHT, WIDTH, Curve, draw_curves
from megarl.report.record import METRICS_FILE, load_metrics

ROOT = Path(__file__).resolve().parents[2]
DATA, FOLDER = ROOT / "docs" / "results" / "curves.jsonl", ROOT / "docs" / "figures"
IN_A_ROW, TITLE = 3, 30
STYLE = """svg{background:var(--card)} text{fill:var(--soft);font:11px system-ui,sans-serif}
.title{fill:var(--ink);font:600 13px system-ui,sans-serif} .legend{font-size:13px} .grid{stroke:var(--rule)}
.axis{stroke:var(--faint)} .hit,.cursor{display:none} .line{fill:none;stroke:var(--line);stroke-width:1.8}
.end,.key{fill:var(--line)}"""
FLOORS = {metric: chart.floor for chart in CRITIC for metric in chart.metrics}


def load_rows() -> dict[tuple[str, ...], dict[str, Any]]:
    rows = [json.loads(line) for line in DATA.read_text().splitlines()]
    return {(row["figure"], row["panel"], row["label"]): row for row in rows}


def add_run(directory: Path, figure: str, label: str, panels: list[str]) -> None:
    lines, rows = load_metrics(directory / METRICS_FILE), load_rows()
    command = shlex.join(["megarl", "train", *load_json_object(directory / RUN_FILE)["overrides"]])
    for panel, metric in (panel.rsplit("=", 1) for panel in panels):
        points = [(line["iteration"], float(f"{line[metric]:.4g}")) for line in lines if metric in line]
        assert points, f"{directory} has no {metric}"
        row = {"figure": figure, "panel": panel, "label": label, "metric": metric, "command": command, "points": points}
        rows[figure, panel, label] = row
    DATA.write_text("".join(f"{json.dumps(row)}\n" for row in rows.values()))


def draw(figure: str) -> str:
    """Its panels, at most IN_A_ROW side by side, and below them the colours of the labels."""
    rows = [row for row in load_rows().values() if row["figure"] == figure]
    labels, panels = (list(dict.fromkeys(row[name] for row in rows)) for name in ("label", "panel"))
    css = (ROOT / "megarl" / "report" / "page.css").read_text()
    lines = [line for line in css.splitlines() if line.startswith(".g") and "--line" in line]
    parts = [f"<style>{css[: css.index('* {')]}{' '.join(lines)}{STYLE}</style>"]
    for number, panel in enumerate(panels):
        shown = [row for row in rows if row["panel"] == panel]
        curves = [Curve(row["label"], labels.index(row["label"]), row["points"]) for row in shown]
        x, y = number % IN_A_ROW * WIDTH, number // IN_A_ROW * (HEIGHT + TITLE)
        parts.append(f'<text class="title" x="{x + 12}" y="{y + 20}">{escape(panel)}</text>')
        chart = draw_curves(curves, floor=min(FLOORS.get(row["metric"], -math.inf) for row in shown))
        parts.append(chart.replace("<svg", f'<svg x="{x}" y="{y + TITLE}" width="{WIDTH}" height="{HEIGHT}"', 1))
    width, y = WIDTH * min(len(panels), IN_A_ROW), math.ceil(len(panels) / IN_A_ROW) * (HEIGHT + TITLE)
    x = 12
    for number, label in enumerate(labels):
        parts.append(f'<g class="g{number}"><rect class="key" x="{x}" y="{y + 8}" width="18" height="4"/></g>')
        parts.append(f'<text class="legend" x="{x + 24}" y="{y + 14}">{escape(label)}</text>')
        x += 48 + 7 * len(label)
    size = f'width="{width}" height="{y + TITLE}" viewBox="0 0 {width} {y + TITLE}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', *parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--add", nargs="+", metavar="WORD")
    if words := (arguments := parser.parse_args()).add:
        add_run(Path(words[0]), words[1], words[2], words[3:])
    drawn = {FOLDER / f"{figure}.svg": draw(figure) for figure in {figure for figure, *_ in load_rows()}}
    old = [path for path, text in drawn.items() if not path.exists() or path.read_text() != text]
    FOLDER.mkdir(exist_ok=True)
    for path in [] if arguments.check else old:
        path.write_text(drawn[path])
    print(
        "".join(f"{path.relative_to(ROOT)}: {'not current' if arguments.check else 'drawn'}\n" for path in old), end=""
    )
    sys.exit(arguments.check and bool(old))


if __name__ == "__main__":
    main()
