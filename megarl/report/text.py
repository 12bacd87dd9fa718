"""Metrics, samples and durations as one line or a few."""

import textwrap
from collections.abc import Callable, Sequence
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
INDENT = " " * 4
LONGEST_TEXT = 600
"""Maximum characters printed of a prompt or response; the middle of a longer one is left out"""
MOST_LINES = 16
"""Maximum actions and observations printed of a conversation; those in its middle are left out"""


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


def wrap(text: str, width: int) -> str:
    """The text with its longer lines broken at spaces, what follows indented. Words stay whole, as a path must."""
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False, replace_whitespace=False)
    lines = []
    for line in text.split("\n"):
        wrapper.subsequent_indent = " " * (len(line) - len(line.lstrip())) + INDENT
        lines += wrapper.wrap(line) if len(line) > width else [line]
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
    verdict, numbers = "correct" if score.correct else "wrong", {"reward": score.reward, **score.details}
    rewards = ", ".join(f"{name} {format_number(value)}" for name, value in numbers.items())
    if score.failure is not None:
        verdict, rewards = "no reward", shorten(make_printable(score.failure))
    size, lines = f"{len(response.token_ids)} tokens", [("response", response.text)]
    if has_observations(response):
        size = f"{len(response.turns)} turns, {int(response.generated.sum())} of {len(response)} tokens generated"
        lines = []
        for turn in list_turns(response, decode):
            lines.append((f"action ({format_number(turn.reward)})" if turn.reward else "action", turn.action))
            lines += [("observation", turn.observation)] if turn.observation else []
        if (num_left_out := len(lines) - MOST_LINES) > 0:
            half = MOST_LINES // 2
            lines[half:-half] = [("...", f"[{num_left_out} actions and observations]")]
    lines = [("prompt", sample.prompt.text), *lines, ("expected", sample.prompt.answer)]
    width = max(len(label) for label, _ in lines)
    head = f"sample {make_printable(sample.prompt.id)}: {verdict}, {rewards}, {size}"
    shown = [f"  {label.ljust(width)}  {shorten(make_printable(text))}" for label, text in lines]
    return "\n".join([f"{head}, ended by {response.finish_reason.value}", *shown])


def format_samples(samples: Sequence[Sample], num_samples: int, decode: Decode | None = None) -> str:
    """The first `num_samples`; where there are both, at least one correct and one wrong. decode: as in `list_turns`."""
    chosen = list(samples[:num_samples])
    for wanted in (True, False):
        others = [s for s in samples if s.score.correct is wanted and s.score.failure is None]
        if len(chosen) > 1 and others and all(s.score.correct is not wanted for s in chosen):
            chosen[-1] = others[0]
    return "\n".join(format_sample(sample, decode) for sample in chosen)


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
