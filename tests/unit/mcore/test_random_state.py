"""Random states of a checkpoint that another kind of device wrote."""

import torch

import megarl.mcore  # noqa: F401


def test_on_a_cpu_the_states_of_a_gpus_generator_are_left_out() -> None:
    from megatron.core import tensor_parallel

    from megarl.mcore.state import _put_random_state, _take_random_state

    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("model-parallel-rng", 3)
    own = _take_random_state()
    # A GPU's state is a seed and an offset.
    foreign = torch.zeros(16, dtype=torch.uint8)
    other = {"torch": own["torch"], "tracker": dict.fromkeys(own["tracker"], foreign), "cuda": foreign}
    kind = other if not torch.cuda.is_available() else {key: other[key] for key in ("torch", "tracker")}
    _put_random_state(kind)
    found = tracker.get_states()
    assert all(torch.equal(found[name], state) for name, state in own["tracker"].items())
    with tracker.fork():
        torch.rand(1)
