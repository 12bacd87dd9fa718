"""Families: log-probs and gradients are those of transformers, under each layout those of one process, and
what is exported is the checkpoint that transformers loads. One launch for all layouts of the cases that -k selects.
"""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from layout_runs import Run, build_spec, compare_runs, find_problems, read, read_layout, run_layouts
from test_layouts import find_budget
from test_one_process import DEMONSTRATIONS, IMITATION
from tiny_checkpoints import padded_reference_logprobs, padded_reference_values, write_checkpoint

from megarl.config.schema.algo import AlgoConfig
from megarl.config.schema.roles import OptimizerConfig
from megarl.mcore.spec import Role
from megarl.models.families import FAMILIES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 100.0}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "rope_theta": 100.0, "original_max_position_embeddings": 16},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
MSCALED = YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}
OF_EXPERTS = ("tp2-sp", "pp2", "cp2", "dp2-ep2", "tp2-sp-ep2")
NESTED = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("llama", {"tied": True, "rope_parameters": LLAMA3}, ("tp2-sp", "pp2", "cp2")),
    "mistral": ("mistral", {"head_dim": 24, "rope_parameters": YARN}, ("tp2-sp", "cp2")),
    "smollm3": ("smollm3", {"tied": True}, ("tp2-sp", "pp2", "cp2")),
    # Windows of 6 tokens in every other of four layers, of which each stage has one.
    "gemma3_text": ("gemma3_text", {"tied": True, "rope_parameters": NESTED}, ("tp2", "tp2-sp", "pp2", "cp2")),
    "phi3": ("phi3", {}, ("tp2-sp", "pp2", "tp4")),
    # Whole norms over ranks that hold some of the heads, and over several with the same key head.
    "olmo2": ("olmo2", {}, ("tp2", "tp2-sp", "tp4", "pp2", "cp2")),
    "deepseek_v3": ("deepseek_v3", {"num_hidden_layers": 2, "rope_parameters": MSCALED}, OF_EXPERTS),
    "gpt_oss": ("gpt_oss", {"rope_parameters": YARN | {"truncate": False}, "swiglu_limit": 0.05}, OF_EXPERTS),
    "moonlight": ("deepseek_v3", {"q_lora_rank": None, "n_group": 1}, ("tp2-sp", "dp2-ep2")),
    "glm4": ("glm4", {}, ("tp2-sp", "pp2", "dp2")),
}
ELSEWHERE = {"glm4_moe", "qwen2", "qwen3", "qwen3_moe"}
"""Families that test_layouts.py proves"""
LEFT = [name for name in FAMILIES if name not in ELSEWHERE | {family for family, *_ in CASES.values()}]
CASES |= {name: (name, {}, ("tp2-sp", "pp2", "cp2")) for name in LEFT}
CASES["olmo3-yarn"] = ("olmo3", {}, ("tp2-sp", "cp2"))
AS_PUBLISHED = {
    "olmo3-yarn": {
        "rope_theta": 500000,
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
            **{"attention_factor": 1.138629436, "beta_fast": 32, "beta_slow": 1},
        },
    }
}
"""Keys of config.json in place of rope_parameters, which transformers would write"""
CONSTANT = "e_score_correction_bias"
CRITICS = ("deepseek_v3", "gpt_oss", "gemma3_text", "olmo2")
NAMES = [(f"{case}-{layout}", case) for case, (_, _, layouts) in CASES.items() for layout in ("one", *layouts)]


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> list[str]:
    """Those of the tests that run."""
    own = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    return sorted({item.callspec.params["case"] for item in own})


@pytest.fixture(scope="module")
def models(cases: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    root = tmp_path_factory.mktemp("families")
    found = {x: (root / x, write_checkpoint(root / x, CASES[x][0], **CASES[x][1])) for x in cases}
    for case in found.keys() & AS_PUBLISHED.keys():
        file = root / case / "config.json"
        fields = json.loads(file.read_text())
        del fields["rope_parameters"]
        file.write_text(json.dumps(fields | AS_PUBLISHED[case]))
        found[case] = root / case, transformers.AutoModelForCausalLM.from_pretrained(root / case)
    return found


@pytest.fixture(scope="module")
def runs(models: dict[str, tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    optimizer, specs = OptimizerConfig(lr=1e-3, eps=1e-5, weight_decay=0.1, clip_grad=1e9), {}
    for case, (path, _) in models.items():
        one = build_spec(Role.policy, path, optimizer=optimizer, algo=IMITATION, temperature=1.0)
        critic = build_spec(Role.critic, path, optimizer=optimizer, algo=AlgoConfig())
        specs[f"{case}-one"] = one
        for layout in CASES[case][2]:
            specs[f"{case}-{layout}"] = replace(
                one, parallel=read_layout(layout), tokens_per_microbatch=find_budget(one, 4)
            )
        if case in CRITICS:
            specs |= {
                f"{case}-critic": critic,
                f"{case}-critic-tp2-sp": replace(critic, parallel=read_layout("tp2-sp")),
            }
    verbs = "scores weights:before gradient:gradient update:3 weights:after evaluate details"
    return run_layouts(tmp_path_factory.mktemp("runs"), specs, DEMONSTRATIONS, verbs)


@pytest.mark.parametrize(("name", "case"), NAMES)
def test_logprobs_are_those_of_transformers(
    name: str, case: str, models: dict[str, tuple[Path, Any]], runs: dict[str, Run]
) -> None:
    expected = padded_reference_logprobs(models[case][1], DEMONSTRATIONS.sequences, 0.8)
    torch.testing.assert_close(runs[name]["scores"][0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "case"), NAMES)
def test_a_layout_computes_what_one_process_does(name: str, case: str, runs: dict[str, Run]) -> None:
    assert find_problems(compare_runs(runs[name], runs[f"{case}-one"])) == []


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_transformers(
    case: str, models: dict[str, tuple[Path, Any]], runs: dict[str, Run], tmp_path: Path
) -> None:
    samples, model = DEMONSTRATIONS, copy.deepcopy(models[case][1])
    rows = samples.sequences.tokens.split(samples.sequences.lengths.tolist())
    losses = []
    for tokens, prompt, mask in zip(rows, samples.sequences.prompt_lengths.tolist(), samples.mask, strict=True):
        logprobs = torch.log_softmax(model(tokens[None]).logits[0], -1)[prompt - 1 : -1]
        losses.append(-logprobs.gather(1, tokens[prompt:, None]).squeeze(1)[mask[: len(logprobs)]])
    torch.cat(losses).mean().backward()
    # Saved as if they were the weights, gradients have the names of a checkpoint.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(tmp_path)
    found = runs[f"{case}-one"].read("gradient")
    for name, expected in read(tmp_path).items():
        if not name.endswith(CONSTANT):
            difference = (found[name] - expected).norm() / expected.norm()
            assert difference < 1e-4, (name, difference)


@pytest.mark.parametrize(("name", "case"), NAMES)
def test_the_export_is_the_checkpoint_and_loads_in_transformers(
    name: str, case: str, models: dict[str, tuple[Path, Any]], runs: dict[str, Run]
) -> None:
    before, after, (path, model) = runs[name].read("before"), runs[name].read("after"), models[case]
    source = read(path)
    assert before.keys() == after.keys() == source.keys()
    assert all(torch.equal(before[key], source[key]) for key in source)
    assert all(torch.equal(after[key], source[key]) is key.endswith(CONSTANT) for key in source)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(runs[name].directory / "before")
    assert all(torch.equal(own, other) for own, other in zip(loaded.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("case", CRITICS)
def test_a_critic_under_tensor_parallelism_has_the_values_of_one_process_and_of_transformers(
    case: str, runs: dict[str, Run]
) -> None:
    one = runs[f"{case}-critic"]
    assert find_problems(compare_runs(runs[f"{case}-critic-tp2-sp"], one)) == []
    model = transformers.AutoModelForSequenceClassification.from_pretrained(one.directory / "before")
    expected = padded_reference_values(model, DEMONSTRATIONS.sequences)
    torch.testing.assert_close(one["scores"][0], expected, rtol=0, atol=1e-5)
