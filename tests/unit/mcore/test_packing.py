import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.packing import pack


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), max_size=60), budget=st.integers(1, 120), num_ranks=st.integers(1, 5))
def test_pack_keeps_its_promises(lengths: list[int], budget: int, num_ranks: int) -> None:
    ranks = pack(lengths, budget, num_ranks)
    assert len(ranks) == num_ranks
    assert len({len(microbatches) for microbatches in ranks}) == 1
    assert len(ranks[0]) >= 1
    rows = [row for microbatches in ranks for rows in microbatches for row in rows]
    assert sorted(rows) == list(range(len(lengths)))
    for microbatches in ranks:
        for chosen in microbatches:
            assert len(chosen) <= 1 or sum(lengths[row] for row in chosen) <= budget
    assert pack(lengths, budget, num_ranks) == ranks


def test_ranks_and_microbatches_are_balanced_by_tokens() -> None:
    lengths = [10 + row % 40 for row in range(400)]
    ranks = pack(lengths, 1024, 4)
    totals = [sum(lengths[row] for rows in microbatches for row in rows) for microbatches in ranks]
    assert max(totals) - min(totals) <= 50
    assert len(ranks[0]) == -(-sum(lengths) // (1024 * 4))


def test_a_sequence_over_the_budget_is_alone() -> None:
    ranks = pack([500, 10, 10, 10], 100, 1)
    assert [0] in ranks[0]
    assert sorted(map(len, ranks[0])) == [1, 3]


def test_fewer_rows_than_ranks_leave_ranks_with_an_empty_microbatch() -> None:
    assert sorted(pack([5], 100, 3)) == [[[]], [[]], [[0]]]


@pytest.mark.parametrize(("lengths", "budget", "ranks"), [([1], 0, 1), ([1], 1, 0), ([3, 0], 10, 1)])
def test_bad_numbers_are_refused(lengths: list[int], budget: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=r"at least 1|row 1 has none"):
        pack(lengths, budget, ranks)
