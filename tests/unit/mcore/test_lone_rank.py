"""A data-parallel group of one rank without a GPU."""

from types import SimpleNamespace

import pytest
import torch

import megarl.mcore  # noqa: F401


@pytest.mark.skipif(torch.cuda.is_available(), reason="the correction is of the CPU")
@pytest.mark.parametrize("name", ["dist_reduce_scatter_func", "dist_all_gather_func"])
def test_a_lone_rank_leaves_its_buffer_where_it_is(name: str) -> None:
    from megatron.core.distributed import param_and_grad_buffer

    buffer = torch.arange(6.0)
    collective = getattr(param_and_grad_buffer, name)
    # Without torch.distributed, a collective of Gloo would raise.
    assert collective(buffer.view(6), buffer, group=SimpleNamespace(size=lambda: 1), async_op=False) is None
    assert torch.equal(buffer, torch.arange(6.0))
    with pytest.raises((ValueError, RuntimeError, TypeError)):
        collective(torch.empty(6), buffer, group=SimpleNamespace(size=lambda: 1), async_op=False)
