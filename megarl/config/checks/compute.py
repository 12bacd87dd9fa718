"""The keys of a role that say how it computes: FP8, recomputed activations, offloading."""

from collections.abc import Iterator

from megarl.algo.registry import needs_critic
from megarl.config.schema.algo import needs_reference
from megarl.config.schema.roles import Dtype, Offload, TrainedRoleConfig
from megarl.config.schema.root import Config


def check_compute(config: Config) -> Iterator[str]:
    """One message per contradiction that is visible without the checkpoint and the machine."""
    yield from _check_role("policy", config.policy)
    if needs_critic(config.algo):
        yield from _check_role("critic", config.critic)
    if needs_reference(config.algo) and config.reference.offload is Offload.optimizer:
        yield "reference.offload: found optimizer; the reference has none: all, or null"


def _check_role(role: str, node: TrainedRoleConfig) -> Iterator[str]:
    if node.recompute_num_layers < 1:
        yield f"{role}.recompute_num_layers: found {node.recompute_num_layers}; it must be 1 or more"
    if node.fp8 and node.dtype is not Dtype.bfloat16:
        yield (
            f"{role}.fp8: found {node.fp8.value} with {role}.dtype={node.dtype.value}; FP8 products need"
            f" {role}.dtype=bfloat16"
        )
