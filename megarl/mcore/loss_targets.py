"""The loss functions' view of a micro-batch: flat response tokens with their targets."""

from torch import Tensor

from megarl.algo.losses import TokenTargets
from megarl.mcore.batch import PackedBatch
from megarl.types import TrainingSamples


def build_targets(samples: TrainingSamples, batch: PackedBatch) -> TokenTargets:
    """The targets of the batch's R response tokens, on the batch's device."""

    def flat(padded: Tensor | None) -> Tensor | None:
        return None if padded is None else batch.flatten(padded)

    device = batch.targets.device
    return TokenTargets(
        rows=batch.token_rows.to(device),
        mask=batch.flatten(samples.mask),
        loss_mask=batch.flatten(samples.loss_mask),
        positive=samples.positive[batch.rows][batch.token_rows].to(device),
        advantages=batch.flatten(samples.advantages),
        old_logprobs=flat(samples.old_logprobs),
        rollout_logprobs=batch.flatten(samples.rollout_logprobs),
        sampling_logprobs=flat(samples.sampling_logprobs),
        ref_logprobs=flat(samples.ref_logprobs),
        old_values=flat(samples.old_values),
        returns=flat(samples.returns),
        critic_mask=flat(samples.critic_mask),
        num_rows=batch.num_rows,
        row_lengths=samples.mask[batch.rows].sum(1).to(device),
    )
