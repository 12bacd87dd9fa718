"""How ranks wait for each other: pipeline stages without an exchange of shapes, collectives no longer than their own
deadline, and what each rank's disk decides as long as the call may take.
"""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from layout_runs import build_spec, collect, gather, launch, launch_each
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from tiny_checkpoints import build_samples, write_checkpoint

from megarl.config.schema.roles import ParallelConfig
from megarl.mcore import batch, process_groups
from megarl.mcore.spec import Role


def run_step(worker: Any, scratch: Path, most_padding: float) -> dict[str, Any]:
    """One step with this bound, the number of exchanges of shapes of all ranks, and what the model says then."""
    stock, exchanges = P2PCommunicator._communicate_shapes, []

    def exchange(self: P2PCommunicator, *given: Any) -> Any:
        exchanges.append(None)
        return stock(self, *given)

    samples = build_samples()
    with patch.object(batch, "MOST_PADDING", most_padding), patch.object(P2PCommunicator, stock.__name__, exchange):
        worker.warm_up()
        (metrics,) = worker.update(samples, [torch.arange(samples.sequences.num_samples)])
        found = gather(worker.logprobs(samples.sequences, 1.0), samples.sequences)
    lengths = [each.tokens.shape[1] for each in worker._batches(samples.sequences)]
    shown = {key: metrics[f"policy/{key}"] for key in ("loss", "grad_norm")}
    return {"exchanges": sum(map(len, collect(exchanges))), "logprobs": found, "lengths": lengths, **shown}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp2", "tp2-sp-pp2-cp2", "pp2-vpp2"])
def test_a_pipeline_whose_micro_batches_have_one_length_exchanges_no_shapes_and_computes_the_same(
    layout: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "model", num_hidden_layers=4)
    spec = build_spec(Role.policy, tmp_path / "model", layout, tokens_per_microbatch=24)
    runs = launch_each(run_step, {"own": (spec, -1.0), "one": (spec, 9.0)})
    own, one = runs["own"], runs["one"]
    assert (own["exchanges"] > 0, one["exchanges"]) == (True, 0)
    assert len(own["lengths"]) > 2
    assert (one["loss"], one["grad_norm"]) == pytest.approx((own["loss"], own["grad_norm"]), rel=1e-5)
    assert torch.allclose(one["logprobs"], own["logprobs"], atol=1e-5)


def wait_for_a_late_rank(rank: int, world_size: int, scratch: Path) -> tuple[float, float]:
    """Seconds that a rank waits for one that is 4 s late: to meet it, and in a collective that may take 1 s."""
    process_groups.initialize(ParallelConfig(), rank, world_size, f"file://{scratch}/init", 1, 60.0, collective_s=1.0)
    seconds = []
    for wait in (process_groups.meet, torch.distributed.barrier):
        start = time.monotonic()
        time.sleep(4.0 * rank)
        with suppress(RuntimeError):
            wait()
        seconds.append(time.monotonic() - start)
    return seconds[0], seconds[1]


def test_a_collective_ends_by_its_own_deadline_and_ranks_meet_within_that_of_the_call() -> None:
    met, collective = launch(2, wait_for_a_late_rank)
    assert met > 3.5
    assert collective < 3.5
