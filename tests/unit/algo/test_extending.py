"""docs/extending.md, followed to the letter: its estimator and its loss; and what the registry refuses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from algo_cases import build_targets, configure, make_experience

from megarl.algo.advantages import ADVANTAGES
from megarl.algo.algorithm import compute_targets
from megarl.algo.losses import count_minibatch, policy_loss
from megarl.algo.objective import find_advantage, find_policy_loss, format_objective
from megarl.config.errors import ConfigError, load_named
from megarl.config.load import load_config
from megarl.config.schema.algo import AlgoConfig

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "extending.md").read_text()


def read_blocks(section: str, language: str) -> list[str]:
    (text,) = re.findall(rf"^## {section}\n(.*?)^## ", GUIDE, re.MULTILINE | re.DOTALL)
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


MODULE, TEST = read_blocks("An advantage estimator", "python")
(PRESET,) = read_blocks("An advantage estimator", "yaml")
(LOSS,) = read_blocks("A policy loss", "python")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current directory, also on Python's path; its modules and declarations are forgotten afterwards."""
    before = set(sys.modules)
    forget_declarations()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]
    forget_declarations()


def forget_declarations() -> None:
    for found in (find_advantage, find_policy_loss):
        found.cache_clear()


def compute_rewards_relative(algo: AlgoConfig) -> list[list[float]]:
    """Advantages of three responses of one and two tokens with the rewards 0, 1 and 5."""
    e = make_experience([0, 0, 0], [1, 2, 1], [0.0, 1.0, 5.0], [False] * 3, 0, holes=False)
    return compute_targets(e, algo, 0.0)[0].advantages.tolist()


def test_the_guides_own_test_passes(folder):
    (folder / "my_estimators.py").write_text(MODULE)
    (folder / "test_my_estimators.py").write_text(TEST)
    result = subprocess.run([sys.executable, "-m", "pytest", "-q", "test_my_estimators.py"], cwd=folder,
                            capture_output=True, text=True)  # fmt: skip
    assert "1 passed" in result.stdout, result.stdout + result.stderr


def test_the_guides_preset_trains_with_the_estimator_and_prints_its_formula(folder):
    (folder / "my_estimators.py").write_text(MODULE)
    (folder / "algo").mkdir()
    (folder / "algo" / "median.yaml").write_text(PRESET)
    algo = load_config([f"hydra.searchpath=[file://{folder}]", "algo=median"]).algo
    assert "advantage   = reward - median reward of the prompt's 8 responses; 8" in format_objective(algo, 8)
    assert compute_rewards_relative(algo) == [[-1.0, 0.0], [0.0, 0.0], [4.0, 0.0]]


def test_an_estimator_of_the_package_is_a_declaration_and_its_name(folder, monkeypatch):
    (folder / "my_estimators.py").write_text(MODULE)
    monkeypatch.setitem(ADVANTAGES, "median", load_named("algo.advantage", "my_estimators.py:MEDIAN"))
    config = load_config(["algo=lite_ppo", "algo.advantage=median", "algo.advantage_std=none"])
    assert compute_rewards_relative(config.algo)[2][0] == 4.0
    with pytest.raises(ConfigError, match=r"the topr terms .* must be group or rloo or median"):
        load_config(["algo=ppo", "algo.topr.positive_loss_coef=1"])


POLICY_LOSS = """
from megarl.algo.declarations import PolicyLoss

SQUARE = PolicyLoss(
    lambda algo: "(A - log pi)^2",
    lambda tokens, algo: ((tokens.advantages - tokens.logprobs).square(), {"policy/a": tokens.advantages}),
)
"""


def test_a_policy_loss_of_ones_own_is_weighted_aggregated_and_logged(folder):
    (folder / "my_losses.py").write_text(POLICY_LOSS)
    algo = configure(advantage="group", surrogate="my_losses:SQUARE", rl_loss_coef=0.5)
    assert "0.5 * (A - log pi)^2" in format_objective(algo, 2)
    e = make_experience([0, 0], [1, 1], [1.0, 0.0], [False] * 2, 0, holes=False)
    samples, _ = compute_targets(e, algo, 0.0)
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    targets = build_targets(samples, torch.arange(2))
    out = policy_loss(logprobs, None, targets, algo, count_minibatch(samples), 4)
    # A = 0.5, -0.5: (1.5^2 + 1.5^2) / 2, weighted by 0.5
    assert float(out.loss) == pytest.approx(0.5 * 2.25)
    assert float(out.sums["policy/a"]) == 0.0


def test_the_guides_loss_is_one_file_with_keys_of_its_own_and_equals_the_packages(folder):
    (folder / "sapo.py").write_text(LOSS)
    given = ["algo=gspo", "algo.surrogate_options.tau_negative=2"]
    own, built_in = (load_config([*given, f"algo.surrogate={name}"]).algo for name in ("sapo.py:SAPO", "sapo"))
    for algo in (own, built_in):
        assert "-4/tau sigmoid(tau (w - 1)) A with tau = 1 where A > 0, else 2" in format_objective(algo, 2)
    e = make_experience([0, 0], [1, 1], [1.0, 0.0], [False] * 2, 0, holes=False)
    samples, _ = compute_targets(e, own, 0.0)
    targets = build_targets(samples, torch.arange(2))
    logprobs = e.old_logprobs.double().flatten() + torch.tensor([1.5, 1.1], dtype=torch.float64).log()
    found, expected = (
        policy_loss(logprobs, None, targets, algo, count_minibatch(samples), 4) for algo in (own, built_in)
    )
    assert float(found.loss) == float(expected.loss) != 0
    assert found.sums == expected.sums
    with pytest.raises(ConfigError, match=r"surrogate_options.tau: algo.surrogate=sapo.py:SAPO has no such option; it"):
        load_config(["algo.surrogate=sapo.py:SAPO", "algo.surrogate_options.tau=1"])
    with pytest.raises(ConfigError, match=r"surrogate_options.tau_positive: found 'x'; it must be a finite number"):
        load_config(["algo.surrogate=sapo", "algo.surrogate_options.tau_positive=x"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "algo.advantage=gaee",
            r"found 'gaee', did you mean gae\?; it must be one of control_variate, gae, .*reinforce, rloo, tether, or",
        ),
        (
            "algo.surrogate=reinforce",
            r"algo\.surrogate: found 'reinforce'; it must be one of cispo, clip, dis, .*logprob, sapo, or FILE",
        ),
        ("algo.advantage=no_such:X", r"importing no_such failed: ModuleNotFoundError.*PYTHONPATH"),
        ("algo.advantage=my_losses:NONE", r"my_losses has no NONE"),
        ("algo.advantage=my_losses:SQUARE", r"my_losses:SQUARE is a PolicyLoss; it must be Adv"),
    ],
)
def test_a_name_that_is_no_choice_is_refused_with_what_would_be_right(folder, override, message):
    (folder / "my_losses.py").write_text(POLICY_LOSS)
    with pytest.raises(ConfigError, match=message):
        load_config([override])


def test_an_estimator_that_gives_another_shape_than_it_declares_is_an_error(folder):
    (folder / "my_estimators.py").write_text(MODULE.replace("per_response=True, ", ""))
    with pytest.raises(ValueError, match=r"my_estimators:MEDIAN: advantages of shape \[3\] found; must be \[3, 2\]"):
        compute_rewards_relative(configure(advantage="my_estimators:MEDIAN"))
