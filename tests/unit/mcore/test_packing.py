import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.mcore.microbatches import pack

ROWS = st.lists(st.tuples(st.integers(1, 50), st.floats(0.1, 100.0)), max_size=60)


def total_costs(ranks: list[list[list[int]]], costs: list[float]) -> list[float]:
    return [math.fsum(costs[row] for rows in microbatches for row in rows) for microbatches in ranks]


def find_lowest_makespan(costs: list[float], num_ranks: int) -> float:
    """The costliest rank of the best of all assignments."""
    assignments = itertools.product(range(num_ranks), repeat=len(costs))
    return min(
        max(math.fsum(cost for cost, at in zip(costs, chosen, strict=True) if at == rank) for rank in range(num_ranks))
        for chosen in assignments
    )


def describe(ranks: list[list[list[int]]], keys: list[tuple[int, float]]) -> list[list[list[tuple[int, float]]]]:
    """The same with lengths and costs in place of row numbers."""
    return [[sorted(keys[row] for row in rows) for rows in microbatches] for microbatches in ranks]


@settings(max_examples=200)
@given(rows=ROWS, budget=st.integers(1, 120), num_ranks=st.integers(1, 5), with_costs=st.booleans())
def test_every_row_is_packed_once_within_the_budget_and_equally_often(
    rows: list[tuple[int, float]], budget: int, num_ranks: int, with_costs: bool
) -> None:
    lengths, costs = [length for length, _ in rows], [cost for _, cost in rows]
    ranks = pack(lengths, budget, num_ranks, costs if with_costs else None)
    assert len(ranks) == num_ranks
    assert len({len(microbatches) for microbatches in ranks}) == 1
    assert len(ranks[0]) >= 1
    packed = [row for microbatches in ranks for chosen in microbatches for row in chosen]
    assert sorted(packed) == list(range(len(lengths)))
    for microbatches in ranks:
        for chosen in microbatches:
            assert len(chosen) <= 1 or sum(lengths[row] for row in chosen) <= budget


@settings(max_examples=200)
@given(rows=ROWS, budget=st.integers(1, 120), num_ranks=st.integers(1, 5))
def test_no_rank_costs_more_than_the_mean_and_a_share_of_the_costliest_row(
    rows: list[tuple[int, float]], budget: int, num_ranks: int
) -> None:
    costs = [cost for _, cost in rows]
    ranks = pack([length for length, _ in rows], budget, num_ranks, costs)
    bound = sum(costs) / num_ranks + (1 - 1 / num_ranks) * max(costs, default=0.0)
    assert max(total_costs(ranks, costs)) <= bound * (1 + 1e-9)


@settings(max_examples=60)
@given(costs=st.lists(st.floats(0.1, 100.0), min_size=1, max_size=7), num_ranks=st.integers(1, 3))
def test_the_costliest_rank_is_within_lpts_guarantee_of_the_best_assignment(costs: list[float], num_ranks: int) -> None:
    found = max(total_costs(pack([10] * len(costs), 25, num_ranks, costs), costs))
    guarantee = 4 / 3 - 1 / (3 * num_ranks)
    assert found <= guarantee * find_lowest_makespan(costs, num_ranks) * (1 + 1e-9)


@settings(max_examples=100)
@given(rows=ROWS, budget=st.integers(1, 120), num_ranks=st.integers(1, 4), random=st.randoms(use_true_random=False))
def test_neither_the_order_of_the_rows_nor_the_unit_of_cost_changes_what_lies_together(
    rows: list[tuple[int, float]], budget: int, num_ranks: int, random: object
) -> None:
    shuffled = rows.copy()
    random.shuffle(shuffled)
    found = pack([length for length, _ in rows], budget, num_ranks, [cost for _, cost in rows])
    again = pack([length for length, _ in shuffled], budget, num_ranks, [4 * cost for _, cost in shuffled])
    assert describe(found, rows) == describe(again, shuffled)


def test_ranks_are_balanced_by_compute_where_equal_tokens_would_not_be() -> None:
    # Attention makes 100 tokens in one row cost 100 * 100, in ten rows 10 * 10 * 10.
    lengths = [100, *[10] * 40]
    ranks = pack(lengths, 1000, 2, [length**2 for length in lengths])
    assert sorted(len(rows) for (rows,) in ranks) == [1, 40]
    assert sorted(len(rows) for (rows,) in pack(lengths, 1000, 2)) == [16, 25]


def test_microbatches_of_a_rank_are_balanced_by_cost_and_its_costliest_is_first() -> None:
    costs = [9.0, 7.0, 6.0, 5.0, 5.0, 1.0]
    # 9, 1 | 7, 5 | 6, 5 by hand: each to the cheapest of three.
    assert pack([10] * 6, 20, 1, costs) == [[[1, 4], [2, 3], [0, 5]]]


def test_a_microbatch_without_room_is_passed_over_for_the_next_cheapest() -> None:
    # 30 tokens more find no room beside 90, which cost less than 20 did.
    assert pack([20, 90, 30], 100, 1, [3.0, 2.0, 1.0]) == [[[0, 2], [1]]]


def test_ranks_and_microbatches_are_balanced_by_tokens_without_costs() -> None:
    lengths = [10 + row % 40 for row in range(400)]
    ranks = pack(lengths, 1024, 4)
    totals = total_costs(ranks, lengths)
    assert max(totals) - min(totals) <= 50
    assert len(ranks[0]) == -(-sum(lengths) // (1024 * 4))


def test_fewer_rows_than_ranks_leave_ranks_with_an_empty_microbatch() -> None:
    assert sorted(pack([5], 100, 3)) == [[[]], [[]], [[0]]]
