"""What is said of a run that goes wrong, and of the gap between its two engines."""

import re
from collections.abc import Mapping
from types import MappingProxyType

import pytest
from page_run import build_metrics

from megarl.config.load import compose_config
from megarl.config.values import list_values
from megarl.report import advice, mismatch_cause, run_charts
from megarl.report.advice import LIMITS, list_warnings
from megarl.report.critic_pictures import QUARTERS
from megarl.report.history import History, derive_metrics
from megarl.report.mismatch_cause import explain_mismatch


def build_history(num_iterations: int = 40, **changes: object) -> History:
    """changes: by the metric's name with __ for its slash; a value, or a function of the iteration."""
    history = History()
    for iteration in range(1, num_iterations + 1):
        line = {"iteration": iteration, **build_metrics(iteration, num_iterations)}
        for name, value in changes.items():
            line[name.replace("__", "/")] = value(iteration) if callable(value) else value
        history.add(derive_metrics(line, history.last) | line)
    return history


def list_titles(history: History) -> list[str]:
    return [warned.title for warned in list_warnings(history, {})]


def test_a_run_that_goes_well_has_no_warning():
    assert list_titles(build_history()) == []
    assert list_titles(History()) == []
    assert list_titles(build_history(reward__equal_groups_frac=0.95, reward__correct=0.97)) == []


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.title)
def test_each_limit_warns_beyond_it_and_not_before(limit):
    beyond = 2 * limit.high if limit.high < float("inf") else limit.low - 1
    name = limit.metric.replace("/", "__")
    assert limit.title in list_titles(build_history(**{name: beyond}))
    assert limit.title not in list_titles(build_history(**{name: beyond}, num_iterations=limit.fewest - 1))


@pytest.mark.parametrize(
    ("title", "changes"),
    [
        ("The training reward has not risen", {"reward__mean": lambda i: 0.5 - i / 1000}),
        ("The held-out reward has fallen", {"reward__heldout": lambda i: min(i, 50 - i) / 25}),
        ("The entropy has collapsed", {"policy__entropy": lambda i: 2 / i**2}),
        ("The policy's gradient has spikes", {"policy__grad_norm": lambda i: 900.0 if i == 30 else 1.0}),
        ("The critic is the worse baseline", {"critic__mse_vs_group": 1.5}),
        ("Trainer and rollout engine disagree", {"mismatch__logprob_gap_mean": 0.4}),
        ("Much time goes into sync", {"time__sync": 30.0}),
    ],
)
def test_each_rule_warns_of_the_run_that_it_is_for(title, changes):
    assert title in list_titles(build_history(**changes))


def find_likely(config: Mapping[str, str] = MappingProxyType({}), **changes: object) -> str:
    return " | ".join(cause.likely for cause in explain_mismatch(build_history(**changes), config))


def test_the_cause_of_a_mismatch_follows_its_size_its_position_and_its_course():
    assert find_likely(mismatch__logprob_gap_mean=1e-7) == "rounding of float32"
    assert "low precision" in find_likely()
    assert "do not compute the same model" in find_likely(mismatch__logprob_gap_mean=0.3)
    assert "older weights" in find_likely(rollout__staleness_mean=1.0)
    names = [f"mismatch__logprob_gap_at_{quarter}" for quarter in QUARTERS]
    assert "errors add up" in find_likely(**dict(zip(names, (0.001, 0.002, 0.003, 0.004), strict=True)))
    assert "the prompt is not the same" in find_likely(**dict(zip(names, (0.02, 0.001, 0.001, 0.001), strict=True)))
    assert "sharper" in find_likely(mismatch__logprob_gap_mean=lambda i: 0.0005 * i)
    assert explain_mismatch(History(), {}) == []


def test_a_gap_of_rounding_is_explained_by_the_dtypes_of_the_run():
    def build(policy: str, rollout: str) -> dict[str, str]:
        return {"policy.dtype": policy, "rollout.dtype": rollout}

    float32, mixed = build("float32", "float32"), build("float32", "bfloat16")
    assert find_likely(float32, mismatch__logprob_gap_mean=1.7e-5) == "rounding of float32"
    found = find_likely(mixed, mismatch__logprob_gap_mean=1.7e-5)
    assert "low precision (policy.dtype=float32 and rollout.dtype=bfloat16)" in found
    assert "do not compute the same model" in find_likely(float32, mismatch__logprob_gap_mean=0.01)
    quantized = {**float32, "rollout.sglang": {"kv_cache_dtype": "fp8_e5m2"}}
    assert "low precision (bfloat16 or FP8)" in find_likely(quantized, mismatch__logprob_gap_mean=0.01)


@pytest.mark.parametrize("module", [advice, mismatch_cause, run_charts], ids=lambda module: module.__name__)
def test_every_key_that_advice_names_is_one_of_the_configuration(module):
    known = {key for key, _ in list_values(compose_config(["experiment=guess"]))} | {"train.log"}
    groups = "algo|policy|critic|rollout|train|checkpoint|logger|reward|environment"
    with open(module.__file__) as file:
        # Texts go on in the next line, with its quotation marks between.
        text = re.sub(r'"\s*\n\s*f?"', "", file.read())
    named = set(re.findall(rf"(?<![\w./])(?:{groups})\.[a-z_.]*[a-z]8?", text))
    assert named
    assert sorted(name for name in named if name not in known) == []
