"""A folder as a run leaves it, with metrics that follow from the iteration, for the tests of its page, a scored
response, and the page read again."""

import contextlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

from megarl.config.load import compose_config
from megarl.config.overrides import list_values
from megarl.report.record import Outcome, State, record_start, write_outcome
from megarl.report.tokens import TokenFile
from megarl.types import FinishReason, Prompt, Response, Rollout, Sample, Score

QUARTERS = ("0_25", "25_50", "50_75", "75_100")


def build_metrics(iteration: int, num_iterations: int) -> dict[str, float]:
    """reward/mean is iteration / num_iterations."""
    done = iteration / num_iterations
    wave = math.sin(iteration)
    constant = {
        **{"reward/std": 0.3, "reward/parts_are_named": 0.5, "length/max": 200.0, "length/truncated_frac": 0.05},
        **{"policy/clip_frac": 0.02, "critic/grad_norm": 2.0, "critic/mse_vs_group": 0.9},
        **{"advantage/lambda_mean": 0.97, "advantage/lambda_at_min_frac": 0.1},
        **{"mismatch/logprob_gap_mean": 0.005, "mismatch/logprob_gap_max": 0.2, "mismatch/kl": 2e-5},
        **{"sync/bytes": 4e8, "sync/seconds_move": 0.2, "sync/seconds_checksum": 0.1, "sync/probe_logprob_gap": 0.01},
        **{"perf/tokens_per_second": 300.0, "time/experience": 2.0, "time/update": 5.0, "time/sync": 0.4},
        **{f"{role}/model_tflop_sum": 0.1 for role in ("policy", "critic")},
        **{f"critic/ev_at_{quarter}": 0.1 * n for n, quarter in enumerate(QUARTERS)},
        **{f"critic/ev_length_q{n}": 0.1 * n for n in range(1, 5)},
        **{f"critic/{what}_{state}_q{n}": 0.2 * n for what in ("value", "outcome") for state in ("first", "middle")
           for n in range(1, 5)},
        **{f"mismatch/logprob_gap_at_{quarter}": 0.002 * (n + 1) for n, quarter in enumerate(QUARTERS)},
    }  # fmt: skip
    changing = {
        "sampling/total_samples": 64.0 * iteration,
        "reward/mean": done,
        "reward/equal_groups_frac": done**2 / 2,
        "length/mean": 100 + 10 * wave,
        "policy/loss": 0.1 * wave,
        "policy/approx_kl": 0.001 * (1 + wave * wave),
        "policy/grad_norm": 1 + wave * wave,
        "critic/explained_variance": 0.5 * done,
        "perf/time_per_step": 17.4 + wave,
        "time/rollout": 10 + wave,
    }
    return constant | changing | ({"reward/heldout": done, "time/evaluate": 3.0} if iteration % 10 == 0 else {})


def write_page_run(folder: Path, num_iterations: int = 40, *, overrides: tuple[str, ...] = ("algo=vapo",)) -> Path:
    """A run that is done; the configuration is what the overrides compose to."""
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        file.write(json.dumps({"iteration": -1, "time/start": 30.0, "sync/bytes": 4e8}) + "\n")
        pretrained = {"critic/explained_variance": 0.1, "critic/loss": 0.1}
        file.write(json.dumps({"iteration": 0, "reward/heldout": 0.0, **pretrained}) + "\n")
        for iteration in range(1, num_iterations + 1):
            file.write(json.dumps({"iteration": iteration, **build_metrics(iteration, num_iterations)}) + "\n")
    config = dict(list_values(compose_config(overrides)))
    (folder / "run.json").write_text(json.dumps({"overrides": overrides, "config": config}))
    objective = "algorithm   = vapo\npolicy loss = 1/N_tok sum_i sum_t[ -min(w A, clip(w, 0.8, 1.28) A) ]"
    record_start(folder, objective=objective, sizes="16 prompts x 16 responses", data="72 prompts", peak_tflops=None)
    write_outcome(folder, Outcome(State.done, results={"iterations": num_iterations}))
    return folder


def write_tokens(folder: Path, num_iterations: int = 40, *, text: str = "an answer") -> None:
    """tokens.jsonl with a wrong response of 10 tokens and a right one of 11 in each iteration."""
    samples = []
    for group, size in enumerate((10, 11)):
        response = Response([0] * size, text, [-0.5] * size, [True] * size, [0] * size, FinishReason.stop)
        prompt = Prompt(f"p{group}", text, (1,), "1")
        samples.append(Sample(prompt, response, Score(float(group), group == 1), group))
    with contextlib.closing(TokenFile(folder / "tokens.jsonl", 2, lambda ids: text * len(ids))) as file:
        for iteration in range(1, num_iterations + 1):
            file.write(iteration, Rollout(tuple(samples), iteration - 1), range(2), {})


def make_sample(text: str, *, name: str = "task-1", correct: bool = True) -> Sample:
    """A scored response, as the terminal and the report print it."""
    num = len(text)
    response = Response(range(num), text, [0.0] * num, [True] * num, [0] * num, FinishReason.stop)
    return Sample(Prompt(name, "2+2=", (1, 2), "4"), response, Score(float(correct), correct, {"format": 0.5}), 0)


VOID = {"meta", "input", "br", "line", "circle", "polyline", "polygon", "rect"}


class Page(HTMLParser):
    """Checks that elements nest, and collects what a reader or a browser would load."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.loads: list[str] = []
        self.charts: list[str] = []
        self.tags: list[str] = []
        # A place where a line may break is no blank to a reader.
        self.feed(page.replace("<wbr>", ""))
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        named = dict(attributes)
        self.loads += [name for name in ("src", "srcset", "data") if name in named] + [tag] * (tag in ("link", "img"))
        self.loads += [name for name in named if name.startswith("on")]
        if "data-chart" in named:
            self.charts.append(str(named["data-chart"]))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.texts))
