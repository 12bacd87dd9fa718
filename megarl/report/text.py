"""Metrics and samples as one line or a few."""

import re
import textwrap
from collections.abc import Sequence

from megarl.report.turns import Decode, ShownTurn, has_observations, list_turns
from megarl.types import Metrics, Sample

TIME = "time/"
KEY_METRICS = (
    ("reward/mean", "reward"),
    ("reward/correct", "correct"),
    ("reward/heldout", "held-out"),
    ("length/mean", "length"),
    ("policy/entropy", "entropy"),
    ("policy/clip_frac", "clip"),
    ("critic/explained_variance", "ev"),
    ("mismatch/kl", "mismatch kl"),
    ("replay/logprob_above", "log-prob above mean reward"),
    ("replay/logprob_below", "below"),
)
"""The metrics shown for every iteration that has them, in this order; all metrics are in metrics.jsonl."""
GLUE = "\u2060"
"""Stands for a space at which no line is broken; WORD JOINER, which nobody prints"""
INDENT = 4
LONGEST_TEXT = 600
"""Maximum characters printed of a prompt or response; the middle of a longer one is left out"""
MOST_TURNS = 8
"""Maximum turns printed of a conversation; those in its middle are left out"""


def format_number(value: float) -> str:
    """The number with at most 4 significant digits: 0.0312, 12.5, 3.1e-05."""
    return f"{value:.0f}" if abs(value) >= 1000 and abs(value) < 1e6 else f"{value:.3g}"


def format_seconds(seconds: float) -> str:
    """The duration as 0.4 s, 12 s, 3 min 20 s, 2 h 01 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def wrap(text: str, width: int, *, breaks_words: bool = False) -> str:
    """The text with its longer lines broken at spaces, what follows indented; a number stays with its name.

    breaks_words: also within words that are longer than a line; otherwise they stay whole, as a path must.
    """
    lines = []
    for line in text.split("\n"):
        if len(line) <= width:
            lines.append(line)
            continue
        units = [each.replace(" ", GLUE) if len(each) < width // 2 else each for each in line.split(" | ")]
        # "rollout 0.136, update 2.5"
        pair = rf"(?<!\S)(\w{{1,{width // 4}}}) (-?\d[\d.e+-]{{,9}})(?=,|$)"
        units = [re.sub(pair, rf"\1{GLUE}\2", each) for each in units]
        start = len(line) - len(line.lstrip())
        broken = textwrap.wrap(
            " | ".join(units),
            width,
            initial_indent="",
            subsequent_indent=" " * (start + INDENT),
            break_long_words=breaks_words,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
        lines += [part.replace(GLUE, " ") for part in broken]
    return "\n".join(lines)


def format_iteration(iteration: int, num_iterations: int, metrics: Metrics) -> str:
    """One compact line: the key metrics, then the seconds of each phase."""
    shown = [f"{label} {format_number(metrics[name])}" for name, label in KEY_METRICS if name in metrics]
    times = [f"{name.removeprefix(TIME)} {format_number(v)}" for name, v in metrics.items() if name.startswith(TIME)]
    if times:
        shown.append(f"seconds: {', '.join(times)}")
    return f"iteration {iteration}/{num_iterations}  " + " | ".join(shown)


def format_sample(sample: Sample, decode: Decode | None = None) -> str:
    """Verdict, prompt, response and expected answer in four lines, safe to print; a conversation has a line for each
    action and each observation in place of the response's. decode: as in `list_turns`.
    """
    response, score = sample.response, sample.score
    verdict = "correct" if score.correct else "wrong"
    numbers = {"reward": score.reward, **score.details}
    rewards = ", ".join(f"{name} {format_number(value)}" for name, value in numbers.items())
    if score.failure is not None:
        verdict, rewards = "no reward", shorten(make_printable(score.failure))
    size, lines = f"{len(response.token_ids)} tokens", [("response", response.text)]
    if has_observations(response):
        size = f"{len(response.turns)} turns, {int(response.generated.sum())} of {len(response)} tokens generated"
        lines = _list_lines(list_turns(response, decode))
    lines = [("prompt", sample.prompt.text), *lines, ("expected", sample.prompt.answer)]
    width = max(len(label) for label, _ in lines)
    return "\n".join(
        (
            f"sample {make_printable(sample.prompt.id)}: {verdict}, {rewards}, {size},"
            f" ended by {response.finish_reason.value}",
            *(f"  {label.ljust(width)}  {shorten(make_printable(text))}" for label, text in lines),
        )
    )


def _list_lines(turns: Sequence[ShownTurn]) -> list[tuple[str, str]]:
    """(label, text) of each action and observation, of at most MOST_TURNS turns."""
    lines: list[tuple[str, str]] = []
    for number, turn in enumerate(turns):
        if len(turns) > MOST_TURNS and MOST_TURNS // 2 <= number < len(turns) - MOST_TURNS // 2:
            if number == MOST_TURNS // 2:
                lines.append(("...", f"[{len(turns) - MOST_TURNS // 2 * 2} turns]"))
            continue
        reward = f" ({format_number(turn.reward)})" if turn.reward else ""
        lines.append((f"action{reward}", turn.action))
        if turn.observation:
            lines.append(("observation", turn.observation))
    return lines


def format_samples(samples: Sequence[Sample], num_samples: int, decode: Decode | None = None) -> str:
    """The first `num_samples`; where there are both, at least one correct and one wrong. decode: as in `list_turns`."""
    chosen = list(samples[:num_samples])
    for wanted in (True, False):
        others = [s for s in samples if s.score.correct is wanted and s.score.failure is None]
        if len(chosen) > 1 and others and all(s.score.correct is not wanted for s in chosen):
            chosen[-1] = others[0]
    return "\n".join(format_sample(sample, decode) for sample in chosen)


def fill_block(page: str, begin: str, end: str, content: str, name: str) -> str:
    """The page with `content` between two marks that stay. Raises ValueError that names the page without them."""
    head, found_begin, rest = page.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"{name}: the lines {begin.strip()} and {end} must both be there")
    return f"{head}{begin}{content}{end}{tail}"


def make_printable(text: str) -> str:
    """The text with control characters escaped: a response must not move the cursor or break the line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shorten(text: str, longest: int = LONGEST_TEXT) -> str:
    """The text, or its two ends around the number of characters left out."""
    if len(text) <= longest:
        return text
    end = longest // 2
    return f"{text[:end]} [... {len(text) - 2 * end} characters ...] {text[-end:]}"
