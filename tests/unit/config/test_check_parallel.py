import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.checks.config import check_parallel, find_nearest_divisor
from megarl.config.schema.roles import ParallelConfig


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            ParallelConfig(num_processes=6, tp=2, cp=2),
            "p.num_processes: found 6, which tp 2 x pp 1 x cp 2 = 4 does not divide; 8 would fit",
        ),
        (
            ParallelConfig(num_processes=9, pp=4),
            "p.num_processes: found 9, which tp 1 x pp 4 x cp 1 = 4 does not divide; 8 would fit",
        ),
        (
            ParallelConfig(tp=2),
            "p.num_processes: found 1, which tp 2 x pp 1 x cp 1 = 2 does not divide; 2 would fit",
        ),
        (ParallelConfig(sp=True), "p.sp: found true at tp 1"),
        (ParallelConfig(vpp=2), "p.vpp: found 2 at pp 1"),
        (
            ParallelConfig(num_processes=16),
            "p: 16 data-parallel ranks share 8 samples (train.samples_per_minibatch); each needs at least one",
        ),
        (
            ParallelConfig(num_processes=8, pp=2, ep=3),
            "p.ep: found 3 with etp 1; etp x ep must divide the 4 processes of a pipeline stage; the nearest that do"
            " are ep=2 etp=1",
        ),
        (ParallelConfig(num_processes=4, ep=4, etp=2), "the nearest that do are ep=2 etp=2"),
    ],
)
def test_a_layout_that_megatron_refuses_is_refused_with_the_nearest_that_works(
    parallel: ParallelConfig, message: str
) -> None:
    (problem,) = check_parallel("p", parallel, samples_per_minibatch=8)
    assert message in problem


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(),
        ParallelConfig(num_processes=8, tp=2, sp=True, pp=2, vpp=2, cp=2),
        ParallelConfig(num_processes=8, tp=2, sp=True, ep=8),
        ParallelConfig(num_processes=8, cp=2, pp=2, ep=2, etp=2),
    ],
)
def test_a_layout_that_megatron_takes_passes(parallel: ParallelConfig) -> None:
    assert list(check_parallel("p", parallel, samples_per_minibatch=8)) == []


def test_what_is_left_is_data_parallel() -> None:
    assert ParallelConfig(num_processes=24, tp=2, pp=3, cp=2).dp == 2


@given(number=st.integers(1, 200), wanted=st.integers(1, 300))
def test_no_divisor_is_nearer(number: int, wanted: int) -> None:
    found = find_nearest_divisor(number, wanted)
    assert number % found == 0
    assert all(abs(n - wanted) >= abs(found - wanted) for n in range(1, number + 1) if number % n == 0)
