"""The bound of the weight sync's probe with real models: Megatron's own random errors, beside transformers."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes.backend import Done
from layout_runs import build_spec, gather, launch_each
from tiny_checkpoints import write_checkpoint
from torch import Tensor

from megarl.config.schema.roles import Dtype
from megarl.config.schema.root import RolloutConfig
from megarl.interfaces import SyncError
from megarl.mcore.spec import Role
from megarl.sync.sync import NUM_ESTIMATES, Probe
from megarl.types import Sequences

pytestmark = pytest.mark.slow

FAMILIES = ("qwen3", "qwen3_moe")
LENGTHS = {"text": 64, "long": 256}
LAYOUTS = {"qwen3": ("tp2", "tp2-sp", "pp2", "pp2-vpp2", "dp2", "cp2"), "qwen3_moe": ("tp2-sp-ep2",)}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    root = tmp_path_factory.mktemp("checkpoints")
    made = {family: write_checkpoint(root / family, family, num_hidden_layers=4) for family in FAMILIES}
    return {family: (root / family, model.to(torch.bfloat16)) for family, model in made.items()}


@pytest.fixture(scope="module")
def texts(checkpoints: dict[str, tuple[Path, Any]]) -> dict[str, tuple[int, ...]]:
    vocab_size = checkpoints["qwen3"][1].config.vocab_size
    return {name: tuple((7919 * (i + 1)) % vocab_size for i in range(size)) for name, size in LENGTHS.items()}


def round_probe(worker: Any, directory: Path, texts: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """By text: the log-probs [1, T], those of copies with random errors of 2^-8, and the former again."""
    found = {}
    for text, tokens in texts.items():
        one, copies = (
            Sequences(torch.tensor(tokens * num), torch.tensor([len(tokens)] * num), torch.tensor([1] * num))
            for num in (1, NUM_ESTIMATES)
        )
        before = gather(worker.logprobs(one, 1.0), one)
        rounded = gather(worker.rounded_logprobs(copies, 1.0, 2.0**-8), copies)
        found[text] = before, rounded, gather(worker.logprobs(one, 1.0), one)
    return found


@pytest.fixture(scope="module")
def runs(checkpoints: dict[str, tuple[Path, Any]], texts: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """What `round_probe` found of each family and layout, in bfloat16."""
    specs = {
        f"{family}-{layout}": build_spec(Role.reference, checkpoints[family][0], layout, dtype=Dtype.bfloat16)
        for family in FAMILIES
        for layout in ("one", *LAYOUTS[family])
    }
    return launch_each(round_probe, specs, texts)


class Policy:
    """What `round_probe` found."""

    def __init__(self, found: tuple[Tensor, Tensor, Tensor]) -> None:
        self.logprobs = lambda sequences, temperature: Done(found[0])
        self.rounded_logprobs = lambda sequences, temperature, unit: Done(found[1])


class Served:
    """A server that computes with transformers in bfloat16."""

    url = "http://server"

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.no_grad()
    def score(self, tokens: tuple[int, ...]) -> list[float]:
        ids = torch.tensor(tokens)
        logprobs = self.model(ids[None]).logits[0].float().log_softmax(-1)
        found: list[float] = logprobs[:-1].gather(1, ids[1:, None])[:, 0].tolist()
        return found


def judge(run: Any, tokens: tuple[int, ...], model: Any) -> float:
    probe = Probe(tokens, RolloutConfig(dtype=Dtype.bfloat16), Dtype.bfloat16)
    probe.ask(Policy(run))  # type: ignore[arg-type]
    return probe.measure([Served(model)])  # type: ignore[list-item]


@pytest.mark.parametrize("text", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_another_engine_in_bfloat16_passes_with_room_to_spare(
    family: str, text: str, runs: dict[str, Any], checkpoints: dict[str, Any], texts: dict[str, Any]
) -> None:
    run = runs[f"{family}-one"][text]
    estimate = float((run[1] - run[0]).abs().median())
    gap = judge(run, texts[text], checkpoints[family][1])
    assert 0 < gap < 2 * estimate


def scale_positions(model: Any) -> None:
    """As linear rope scaling, factor 4, on one side alone."""
    model.model.rotary_emb.inv_freq /= 4


def take_another_activation(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = torch.nn.ReLU()


@pytest.mark.parametrize("text", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plant", [scale_positions, take_another_activation])
def test_an_engine_that_computes_another_model_in_bfloat16_is_found(
    plant: Any, family: str, text: str, runs: dict[str, Any], checkpoints: dict[str, Any], texts: dict[str, Any]
) -> None:
    model = copy.deepcopy(checkpoints[family][1])
    plant(model)
    with pytest.raises(SyncError, match="computes another model than the policy"):
        judge(runs[f"{family}-one"][text], texts[text], model)


@pytest.mark.parametrize("name", [f"{family}-{layout}" for family in FAMILIES for layout in LAYOUTS[family]])
def test_random_errors_are_as_large_in_every_layout_and_leave_nothing_behind(name: str, runs: dict[str, Any]) -> None:
    one, found = runs[f"{name.partition('-')[0]}-one"], runs[name]
    for text in LENGTHS:
        before, rounded, after = found[text]
        assert torch.equal(before, after)
        assert rounded.shape == (NUM_ESTIMATES, LENGTHS[text] - 1)
        size, expected = ((x[1] - x[0]).abs().median() for x in (found[text], one[text]))
        assert 0.5 * expected < size < 2 * expected
