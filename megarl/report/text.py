"""Metrics, samples and durations as one line or a few."""

import re
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megarl.types import Metrics, Response, Sample

Decode = Callable[[list[int]], str | list[str]]
"""A tokenizer's `decode`; with special tokens, which show where an observation's messages begin"""

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


@dataclass(frozen=True)
class ShownTurn:
    """One turn, for people."""

    action: str
    observation: str
    """Empty where there is none"""
    reward: float


def has_observations(response: Response) -> bool:
    """Whether there is more to show than one action."""
    return len(response.turns) > 1 or not bool(response.generated.all())


def list_turns(response: Response, decode: Decode | None) -> list[ShownTurn]:
    """The turns in order; without an action, one first where the response begins with an observation.

    decode: reads an observation's tokens; None: their number stands in its place.
    """

    def read(start: int, end: int) -> str:
        if start == end:
            return ""
        return str(decode(response.token_ids[start:end].tolist())) if decode else f"[{end - start} tokens]"

    turns = response.turns
    ends = [turn.start for turn in turns[1:]] + [len(response)]
    shown = [ShownTurn(turn.text, read(turn.end, end), turn.reward) for turn, end in zip(turns, ends, strict=True)]
    return [*([ShownTurn("", first, 0.0)] if (first := read(0, turns[0].start)) else []), *shown]


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


class Pace:
    """Says once, after the first iteration, how long the others take."""

    def __init__(self, num_iterations: int, max_minutes: float | None = None):
        """max_minutes: train.max_minutes, which counts from here; None: no limit."""
        self._num_iterations, self._max_minutes = num_iterations, max_minutes
        self._started: float | None = time.monotonic()

    def check(self, iteration: int, metrics: Metrics) -> Iterator[str]:
        """metrics: of the iteration, perf/time_per_step among them where it has responses."""
        seconds, num_left = metrics.get("perf/time_per_step"), self._num_iterations - iteration
        if self._started is None or seconds is None:
            return
        passed, self._started = time.monotonic() - self._started, None
        if num_left > 0:
            left_s = None if self._max_minutes is None else 60 * self._max_minutes - passed
            yield format_pace(seconds, num_left, left_s)


def format_pace(seconds: float, num_left: int, left_s: float | None = None) -> str:
    """`pace: 34 s an iteration; the other 11 take about 6 min 14 s`, and how many of them there is time for.

    seconds: of an iteration. left_s: until the limit of time; the iteration in which it is passed is the last.
    """
    text = f"pace: {format_seconds(seconds)} an iteration; the other {num_left} take about"
    text += f" {format_seconds(num_left * seconds)}"
    num_allowed = num_left if left_s is None else 1 + int(max(0.0, left_s) / seconds)
    if num_allowed < num_left:
        text += f"; train.max_minutes leaves time for about {num_allowed} of them"
    return text


def format_heldout(rewards: Sequence[tuple[int, float]]) -> str:
    """`held-out reward: 0.0143 before training, 0.273 after iteration 17; best 0.28 after iteration 12`.

    rewards: of the evaluations (iteration, reward), in order; one at least.
    """

    def show(point: tuple[int, float]) -> str:
        return f"{format_number(point[1])} {'before training' if point[0] == 0 else f'after iteration {point[0]}'}"

    first, last, best = rewards[0], rewards[-1], max(rewards, key=lambda point: point[1])
    shown = [show(first), show(last)] if len(rewards) > 1 else [show(first)]
    return f"held-out reward: {', '.join(shown)}" + (f"; best {show(best)}" if best not in (first, last) else "")


def make_printable(text: str) -> str:
    """The text with control characters escaped: a response must not move the cursor or break the line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shorten(text: str, longest: int = LONGEST_TEXT) -> str:
    """The text, or its two ends around the number of characters left out."""
    if len(text) <= longest:
        return text
    end = longest // 2
    return f"{text[:end]} [... {len(text) - 2 * end} characters ...] {text[-end:]}"
