"""tools/check_layouts.py: which layouts it proposes, on what data, and its verdict."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_loading import load_tool

from megarl.config.load import load_config
from megarl.config.schema.roles import ParallelConfig
from megarl.mcore.compare_layouts import LayoutDifference, describe_layout
from megarl.mcore.worker_spec import Role
from megarl.run.inputs import load_models, load_specs

tool = load_tool("check_layouts.py")
EQUAL = LayoutDifference(1.0, 2.0, 0.0, 0.0, 0.0, "model.norm.weight", 0.0, 0.0)


def list_for(num_processes: int, *overrides: str) -> dict[Role, list[ParallelConfig]]:
    config = load_config(["model=tiny", *overrides])
    models = load_models(config)
    return {
        role: tool.list_layouts(
            num_processes,
            models.architecture.num_layers,
            lambda layout, spec=spec: not tool.find_layout_problems(config, models.architecture, spec, layout),
        )
        for role, spec in load_specs(config, models).items()
    }


def name_all(layouts: list[ParallelConfig]) -> set[str]:
    names = [describe_layout(layout) for layout in layouts]
    assert len(set(names)) == len(names), "two layouts with one name"
    return set(names)


@settings(max_examples=50)
@given(num_processes=st.integers(1, 12), num_layers=st.integers(1, 8))
def test_every_layout_is_proposed_once_and_its_processes_divide_the_given_number(
    num_processes: int, num_layers: int
) -> None:
    layouts = tool.list_layouts(num_processes, num_layers, lambda layout: layout.num_processes % layout.tp == 0)
    assert all(num_processes % layout.num_processes == 0 for layout in layouts)
    assert len({repr(layout) for layout in layouts}) == len(layouts)
    sizes = [layout.num_processes for layout in layouts]
    assert sizes == sorted(sizes)
    assert layouts[0] == ParallelConfig()


def test_two_processes_have_the_seven_layouts_of_a_dense_model() -> None:
    expected = {"one", "dp2", "cp2", "pp2", "pp2-vpp2", "tp2", "tp2-sp"}
    for layouts in list_for(2, "model.random.num_layers=4").values():
        assert name_all(layouts) == expected


def test_four_processes_have_the_mixtures_and_nothing_that_the_model_does_not_divide_into() -> None:
    names = name_all(list_for(4, "model.random.num_layers=4")[Role.policy])
    mixtures = {"pp2-dp2", "tp2-cp2", "tp2-sp-pp2", "tp2-sp-pp2-vpp2", "pp2-cp2", "tp2-sp-cp2", "cp2-dp2", "cp4", "dp4"}
    assert names > mixtures | {"pp4"}
    # Four ranks share two key-value heads by holding each twice.
    assert {"tp4", "tp4-sp"} < names
    # Four layers do not make eight pieces, a dense model has no experts.
    assert not any("ep" in name or name == "pp4-vpp2" for name in names)


def test_a_layout_with_too_few_samples_for_its_ranks_is_left_out() -> None:
    names = name_all(list_for(4, "train.samples_per_minibatch=2")[Role.policy])
    assert "dp2" in names
    assert "dp4" not in names


def test_a_full_kl_leaves_pipelines_to_the_critic_alone() -> None:
    layouts = list_for(2, "algo.kl.in_loss=true", "algo.kl.loss_estimator=full")
    assert "pp2" not in name_all(layouts[Role.policy])
    assert "pp2" in name_all(layouts[Role.critic])


def test_sequences_are_ragged_within_the_configured_lengths_and_hold_no_special_token() -> None:
    config = load_config(["model=tiny"])
    models = load_models(config)
    vocabulary = tool.find_vocabulary(models.checkpoint, models.architecture.vocab_size)
    assert set(vocabulary.tolist()) == set(range(3, models.architecture.vocab_size))
    sequences = tool.make_sequences(config, vocabulary, 20)
    assert sequences.tokens.min() >= 3
    assert len(sequences.tokens) == sequences.lengths.sum()
    for lengths, longest in (
        (sequences.prompt_lengths, config.data.prompt_length),
        (sequences.response_lengths, config.rollout.response_length),
    ):
        assert lengths.min() >= 1
        assert lengths.max() == longest
        assert len(set(lengths.tolist())) > 5


def test_targets_lie_near_what_the_models_say_and_outside_responses_they_are_zero() -> None:
    config = load_config(["model=tiny"])
    sequences = tool.make_sequences(config, torch.arange(3, 11), 20)
    exists = torch.arange(config.rollout.response_length) < sequences.response_lengths[:, None]
    logprobs, values = -2.0 * exists, 0.5 * exists
    samples = tool.make_samples(sequences, logprobs, values, seed=1)
    assert (samples.old_logprobs - logprobs).abs().max() < 0.6
    assert (samples.old_values - values).abs().max() < 0.6
    for tensor in (samples.advantages, samples.returns, samples.ref_logprobs, samples.mask.float()):
        assert not tensor[~exists].any()
    assert (samples.loss_mask <= samples.mask).all()
    assert 0 < samples.loss_mask.sum() < samples.mask.sum() < exists.sum()


def test_the_verdict_names_what_differs_or_failed_and_sets_the_exit_code() -> None:
    difference = replace(EQUAL, gradient_difference=0.5)
    outcomes = [
        tool.Outcome(Role.policy, "one", 1, EQUAL, ()),
        tool.Outcome(Role.policy, "tp2", 2, difference, tuple(difference.find_problems(tool.Bounds()))),
        tool.Outcome(Role.critic, "pp2", 2, None, ("failed: Boom",)),
    ]
    assert tool.conclude(outcomes) == ("DIFFERENT: 2 of 3: policy tp2, critic pp2", 1)
    assert tool.conclude(outcomes[:1]) == ("equal: all 1 compute what one process computes", 0)
    assert "gradient of model.norm.weight: differs by 0.5" in str(outcomes[1])
    assert str(outcomes[2]) == "| critic | pp2 | 2 | - | - | - | - | - | - | failed: Boom |"


@pytest.mark.parametrize("cells", [str(tool.Outcome(Role.policy, "one", 1, EQUAL, ())), tool.HEADER, tool.RULE])
def test_every_line_of_the_table_has_the_same_number_of_cells(cells: str) -> None:
    assert cells.count("|") == 11
