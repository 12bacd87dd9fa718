"""Rows of one prompt are planned into micro-batches together, where they share it."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_row_costs import build_architecture, build_spec

from megarl.config.schema.roles import ParallelConfig
from megarl.mcore.microbatches import LONGEST_SHARING, group_rows, plan_microbatches
from megarl.mcore.model.architecture import Experts
from megarl.mcore.packing import pack
from megarl.mcore.row_costs import compute_row_costs
from megarl.mcore.worker_spec import Role, WorkerSpec
from megarl.types import Sequences

ARCH = build_architecture()


def build_spec_of(budget: int, share_prompts: bool = True, cp: int = 1) -> WorkerSpec:
    spec = vars(build_spec(Role.policy)) | {"tokens_per_microbatch": budget, "share_prompts": share_prompts}
    return WorkerSpec(**spec | {"parallel": ParallelConfig(num_processes=cp, cp=cp)})


def build_sequences(prompts: list[tuple[int, list[int]]]) -> Sequences:
    """Of each prompt its tokens and those of its responses; rows of all prompts in turn, as a shuffle might have it."""
    rows = [(number, size, response) for number, (size, responses) in enumerate(prompts) for response in responses]
    rows.sort(key=lambda row: (row[2] * 7919 % 101, row))
    numbers, sizes, responses = (torch.tensor(column, dtype=torch.int64) for column in zip(*rows, strict=True))
    return Sequences(torch.zeros(0, dtype=torch.int64), sizes + responses, sizes, prompts=numbers)


@settings(max_examples=50)
@given(
    prompts=st.lists(
        st.tuples(st.integers(1, 60), st.lists(st.integers(0, 40), min_size=1, max_size=8)), min_size=1, max_size=8
    ),
    budget=st.integers(64, 400),
    num_ranks=st.sampled_from([1, 2, 4]),
)
def test_every_row_is_in_one_microbatch_whose_tokens_with_prompts_once_are_within_the_budget(
    prompts: list[tuple[int, list[int]]], budget: int, num_ranks: int
) -> None:
    sequences = build_sequences(prompts)
    ranks = plan_microbatches(build_spec_of(budget), ARCH, sequences, num_ranks)
    assert len({len(share) for share in ranks}) == 1
    microbatches = [rows for share in ranks for rows in share]
    assert sorted(row for rows in microbatches for row in rows) == list(range(sequences.num_samples))
    for rows in microbatches:
        lone = [row for row in rows if sequences.response_lengths[row] == 0]
        shared = {int(sequences.prompts[row]): row for row in rows if row not in lone}
        tokens = int(sequences.response_lengths[rows].sum())
        tokens += sum(int(sequences.prompt_lengths[row]) for row in [*shared.values(), *lone])
        assert tokens <= budget or len(rows) == 1


def test_on_one_rank_the_responses_to_a_prompt_stay_together_where_they_fit() -> None:
    sequences = build_sequences([(30, [10] * 8), (30, [11] * 8), (30, [12] * 8), (30, [13] * 8)])
    (share,) = plan_microbatches(build_spec_of(140), ARCH, sequences, 1)
    assert sorted(sorted(set(sequences.prompts[rows].tolist())) for rows in share) == [[0], [1], [2], [3]]


def test_ranks_are_given_about_equally_much_of_one_prompts_responses() -> None:
    sequences = build_sequences([(30, [10] * 16)])
    ranks = plan_microbatches(build_spec_of(10_000), ARCH, sequences, 4)
    assert [sum(len(rows) for rows in share) for share in ranks] == [4, 4, 4, 4]


def test_long_and_empty_responses_keep_prompts_of_their_own() -> None:
    sequences = build_sequences([(5, [LONGEST_SHARING + 1, LONGEST_SHARING, 3, 0])])
    responses = sequences.response_lengths.tolist()
    groups = [[responses[row] for row in rows] for rows in group_rows(sequences)]
    assert sorted(groups) == [[0], [LONGEST_SHARING, 3], [LONGEST_SHARING + 1]]


def test_without_sharing_rows_are_packed_one_by_one() -> None:
    sequences = build_sequences([(30, [10, 12, 9]), (20, [30, 2])])
    experts = build_architecture(Experts(num_experts=8, top_k=2, ffn_size=6, normalized=True))
    for spec, arch in (
        (build_spec_of(100, share_prompts=False), ARCH),
        (build_spec_of(100), experts),
        (build_spec_of(50, cp=2), ARCH),
    ):
        expected = pack(sequences.lengths.tolist(), 100, 1, compute_row_costs(arch, sequences))
        assert plan_microbatches(spec, arch, sequences, 1) == expected
