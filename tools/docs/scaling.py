"""The picture and the tables of docs/planning.md that show how the planned iteration scales from 8 to 1,024 GPUs.

    python tools/docs/scaling.py             draw them from the layouts in docs/planning/scaling.json
    python tools/docs/scaling.py --check     exit code 1 where they are not current
    python tools/docs/scaling.py --search    find the layouts again; 10 minutes on one core

For each number of GPUs the layout is the fastest of the search for algo=vapo with cluster.placement=colocated.
Strong scaling: 512 prompts x 16 responses an iteration on all. Weak scaling: as many for each GPU as 512 on 64 GPUs
(qwen32b) or on 256 (qwen3_235b_a22b), and minibatches that grow as much.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.plan.estimate import build_plan
from megarl.plan.jobs import find_models
from megarl.plan.layouts import count_quickly
from megarl.plan.scaling import PARTS, split_iteration
from megarl.plan.search import search
from megarl.report.text import fill_block

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "planning.md"
PICTURE = ROOT / "docs" / "planning" / "scaling.svg"
LAYOUTS = PICTURE.with_suffix(".json")
BEGIN, END = "<!-- begin scaling: made by tools/docs/scaling.py -->\n", "<!-- end scaling -->"
NODES = (1, 2, 4, 8, 16, 32, 64, 128)
GPUS_OF_512 = {"qwen32b": 64, "qwen3_235b_a22b": 256}
"""GPUs on which weak scaling has 512 prompts"""
COLOURS = ("#2a6fdb", "#8cb4f5", "#178f79", "#d9772b", "#b0458f", "#8b8e94")
"""Of the parts, in their order"""
WIDTH, LABEL, BAR, ROW, HEAD = 720, 84, 420, 22, 34


@dataclass(frozen=True)
class Point:
    """The plan of a job on so many GPUs."""

    num_gpus: int
    seconds: dict[str, float] | None
    """By PARTS; None: the search finds no plan that fits"""

    @property
    def total(self) -> float:
        return sum((self.seconds or {}).values())


@dataclass(frozen=True)
class Panel:
    model: str
    is_weak: bool
    points: Sequence[Point]

    @property
    def title(self) -> str:
        kind = "weak" if self.is_weak else "strong"
        sizes = f" for each {GPUS_OF_512[self.model]} GPUs" if self.is_weak else ""
        return f"{self.model}, {kind} scaling: 512 prompts x 16 responses{sizes}"

    def find_efficiency(self, point: Point) -> float:
        """Samples a second and GPU, over those on the fewest GPUs on which the job fits."""
        first = next(each for each in self.points if each.seconds)
        growth = 1.0 if self.is_weak else point.num_gpus / first.num_gpus
        return first.total / (point.total * growth)


def list_cases() -> Iterator[tuple[str, bool, int]]:
    yield from ((model, is_weak, nodes) for model in GPUS_OF_512 for is_weak in (False, True) for nodes in NODES)


def name_case(model: str, is_weak: bool, nodes: int) -> str:
    return f"{model}, {'weak' if is_weak else 'strong'}, {8 * nodes} GPUs"


def list_arguments(model: str, is_weak: bool, nodes: int) -> list[str]:
    sizes = ["algo=vapo", f"model={model}", "cluster=h100x64", f"cluster.num_nodes={nodes}"]
    prompts = 512 * 8 * nodes // GPUS_OF_512[model]
    grown = [f"train.prompts_per_iteration={prompts}", f"train.samples_per_minibatch={prompts}"]
    return [*sizes, "cluster.placement=colocated", *(grown if is_weak else [])]


def find_layout(model: str, is_weak: bool, nodes: int) -> list[str] | None:
    """The overrides of the fastest plan; None: none fits."""
    arguments = list_arguments(model, is_weak, nodes)
    found = search(arguments, find_models(load_config(arguments)))
    return list(found[0].overrides) if found else None


def plan_point(model: str, is_weak: bool, nodes: int, layout: list[str] | None) -> Point:
    """Raises ConfigError where the layout in scaling.json does not fit any more."""
    if layout is None:
        return Point(8 * nodes, None)
    config = load_config([*list_arguments(model, is_weak, nodes), *layout])
    plan = build_plan(config, find_models(config), count=count_quickly)
    if plan.problems:
        where = name_case(model, is_weak, nodes)
        raise ConfigError([f"{LAYOUTS.name}: {where}: {each.message}" for each in plan.problems])
    return Point(8 * nodes, split_iteration(config, plan))


def load_layouts() -> dict[str, list[str] | None]:
    """The overrides of each case; None: no plan fits."""
    return dict(json.loads(LAYOUTS.read_text()))


@cache
def plan_panels() -> tuple[Panel, ...]:
    layouts = load_layouts()
    points = {case: plan_point(*case, layouts[name_case(*case)]) for case in list_cases()}
    return tuple(
        Panel(model, is_weak, [points[model, is_weak, nodes] for nodes in NODES])
        for model in GPUS_OF_512
        for is_weak in (False, True)
    )


def draw(panels: Sequence[Panel]) -> str:
    """An SVG file: for each number of GPUs a bar of the parts' shares, the seconds and the efficiency."""
    parts, y = [], 0
    for panel in panels:
        parts.append(f'<text class="title" x="12" y="{y + 22}">{panel.title}</text>')
        for number, point in enumerate(panel.points):
            parts += draw_bar(panel, point, y + HEAD + ROW * number)
        y += HEAD + ROW * len(panel.points) + 10
    for number, (colour, text) in enumerate(zip(COLOURS, PARTS.values(), strict=True)):
        left, top = 12 + WIDTH // 2 * (number % 2), y + 18 * (number // 2) + 8
        parts.append(f'<rect x="{left}" y="{top}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{left + 18}" y="{top + 10}">{text}</text>')
    height = y + 18 * 3 + 16
    style = (
        ".page { fill: #ffffff; } text { fill: #5d6066; font: 11px system-ui, sans-serif; } text.title { fill:"
        " #1c1d1f; font: 600 13px system-ui, sans-serif; } @media (prefers-color-scheme: dark) { .page { fill:"
        " #1d1f22; } text { fill: #a9acb2; } text.title { fill: #e9e9e6; } }"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    page = f'<rect class="page" width="{WIDTH}" height="{height}"/>'
    return f'{head} role="img"><style>{style}</style>{page}' + "\n".join(parts) + "</svg>\n"


def draw_bar(panel: Panel, point: Point, y: int) -> Iterator[str]:
    yield f'<text x="{LABEL - 8}" y="{y + 12}" text-anchor="end">{point.num_gpus:,} GPUs</text>'
    if point.seconds is None:
        yield f'<text x="{LABEL}" y="{y + 12}">no plan fits</text>'
        return
    left = float(LABEL)
    for colour, (name, text) in zip(COLOURS, PARTS.items(), strict=True):
        share = point.seconds[name] / point.total
        title = f"<title>{text}: {point.seconds[name]:,.0f} s, {share:.0%}</title>"
        size = f'x="{left:.1f}" y="{y}" width="{BAR * share:.1f}" height="{ROW - 6}"'
        yield f'<rect {size} fill="{colour}">{title}</rect>'
        left += BAR * share
    text = f"{point.total:,.0f} s, efficiency {panel.find_efficiency(point):.2f}"
    yield f'<text x="{LABEL + BAR + 10}" y="{y + 12}">{text}</text>'


def render_table(panels: Sequence[Panel]) -> str:
    """Seconds, efficiency and the part that takes most, by the number of GPUs."""
    lines = []
    for panel in panels:
        lines += [f"{panel.title}:\n", f"| GPUs | iteration, s | efficiency | {' | '.join(PARTS.values())} |"]
        lines.append("| " + " | ".join(["---"] * (3 + len(PARTS))) + " |")
        for point in panel.points:
            if point.seconds is None:
                lines.append(f"| {point.num_gpus:,} | no plan fits |" + " |" * (1 + len(PARTS)))
                continue
            largest = max(point.seconds.values())
            cells = [f"**{part:,.0f}**" if part == largest else f"{part:,.0f}" for part in point.seconds.values()]
            numbers = f"{point.total:,.0f} | {panel.find_efficiency(point):.2f}"
            lines.append(f"| {point.num_gpus:,} | {numbers} | {' | '.join(cells)} |")
        lines.append("")
    return "\n" + "\n".join(lines)


def render_page() -> str:
    return fill_block(PAGE.read_text(), BEGIN, END, render_table(plan_panels()), str(PAGE))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--search", action="store_true")
    args = parser.parse_args()
    if args.search:
        found = {name_case(*case): find_layout(*case) for case in list_cases()}
        LAYOUTS.write_text(json.dumps(found, indent=1) + "\n")
    texts = {PICTURE: draw(plan_panels()), PAGE: render_page()}
    stale = {file: text for file, text in texts.items() if not file.is_file() or file.read_text() != text}
    for file, text in stale.items():
        print(f"{file.relative_to(ROOT)}: {'not current' if args.check else 'written'}")
        if not args.check:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
