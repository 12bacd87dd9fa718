"""A role's layout: what Megatron's arithmetic does not allow, with the nearest numbers that it does."""

from collections.abc import Iterator
from math import isqrt

from megarl.config.schema.roles import OptimizerConfig, ParallelConfig

MAX_PROCESSES = 100_000


def check_parallel(key: str, parallel: ParallelConfig, samples_per_minibatch: int) -> Iterator[str]:
    """One message per problem of the layout under `key`; what depends on the model is checked with the model."""
    names = ("num_processes", "tp", "pp", "vpp", "cp", "ep", "etp")
    bad = [
        f"{key}.{name}: found {value}; it must be 1 or more and at most {MAX_PROCESSES}"
        for name in names
        if not 1 <= (value := getattr(parallel, name)) <= MAX_PROCESSES
    ]
    yield from bad
    if bad:
        return
    yield from _check_product(key, parallel, samples_per_minibatch)
    if parallel.sp and parallel.tp == 1:
        yield f"{key}.sp: found true at tp 1; it splits over tensor-parallel ranks: set {key}.tp, or sp=false"
    if parallel.vpp > 1 and parallel.pp == 1:
        yield (
            f"{key}.vpp: found {parallel.vpp} at pp 1; it cuts each stage of a pipeline into pieces: set {key}.pp to"
            " 2 or more, or vpp=1"
        )


def check_overlap(key: str, optimizer: OptimizerConfig) -> Iterator[str]:
    """One message per problem of the optimizer under `key`."""
    if optimizer.overlap_param_gather and optimizer.overlap_grad_reduce is False:
        yield f"{key}.overlap_param_gather: found true, which needs {key}.overlap_grad_reduce=true, or null"


def _check_product(key: str, parallel: ParallelConfig, samples_per_minibatch: int) -> Iterator[str]:
    total, model_size = parallel.num_processes, parallel.tp * parallel.pp * parallel.cp
    if total % model_size:
        yield (
            f"{key}.num_processes: found {total}, which tp {parallel.tp} x pp {parallel.pp} x cp {parallel.cp}"
            f" = {model_size} does not divide; {_nearest_multiple(total, model_size)} would fit"
        )
        return
    if samples_per_minibatch < parallel.dp:
        yield (
            f"{key}: {parallel.dp} data-parallel ranks share {samples_per_minibatch} samples"
            " (train.samples_per_minibatch); each needs at least one"
        )
    # The experts' layout: etp x ep x expert data parallelism in each pipeline stage.
    stage = total // parallel.pp
    if stage % (parallel.etp * parallel.ep):
        etp = find_nearest_divisor(stage, parallel.etp)
        ep = find_nearest_divisor(stage // etp, parallel.ep)
        yield (
            f"{key}.ep: found {parallel.ep} with etp {parallel.etp}; etp x ep must divide the {stage} processes of a"
            f" pipeline stage; the nearest that do are ep={ep} etp={etp}"
        )


def find_nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`, the smaller of two."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    divisors = [*small, *(number // n for n in small)]
    return min(divisors, key=lambda n: (abs(n - wanted), n))


def _nearest_multiple(number: int, factor: int) -> int:
    """The multiple of `factor` nearest to `number`, the greater of two; at least one of it."""
    return max(1, (2 * number + factor) // (2 * factor)) * factor
