"""How a minibatch's token losses become one number (`loss_agg_mode`).

Suffix: R flat response tokens of one micro-batch. N_tok and N_seq are counted over the global minibatch, so that the
sum over micro-batches and ranks does not depend on how the minibatch was cut.
"""

import torch
from torch import Tensor

from megarl.config.schema.algo_choices import LossAggMode

_TOKEN_MEAN = LossAggMode["token-mean"]
_SEQ_TOKEN_MEAN = LossAggMode["seq-mean-token-mean"]
_SEQ_TOKEN_SUM_NORM = LossAggMode["seq-mean-token-sum-norm"]


def aggregate(
    token_loss_R: Tensor,
    mode: LossAggMode,
    rows: Tensor,
    row_lengths: Tensor,
    num_tokens: int,
    num_sequences: int,
    response_length: int | None = None,
) -> Tensor:
    """This micro-batch's part of the aggregate, a scalar.

    token_loss_R: float [R], 0 where the token has no loss. row_lengths: int64 [rows], l_i.
    token-mean: sum / N_tok; seq-mean-token-sum: sum / N_seq; seq-mean-token-mean: sum_i (sum_t / l_i) /
    N_seq; seq-mean-token-sum-norm: sum / (N_seq * response_length), the configured maximum.
    """
    if mode is _TOKEN_MEAN:
        return token_loss_R.sum() / max(num_tokens, 1)
    num_sequences = max(num_sequences, 1)
    if mode is _SEQ_TOKEN_MEAN:
        sums = torch.zeros(row_lengths.shape, dtype=token_loss_R.dtype, device=token_loss_R.device)
        sums = sums.index_add(0, rows, token_loss_R)
        return (sums / row_lengths.clamp(min=1)).sum() / num_sequences
    if mode is _SEQ_TOKEN_SUM_NORM:
        if response_length is None:
            raise ValueError("response_length: none found; loss_agg_mode=seq-mean-token-sum-norm divides by it")
        return token_loss_R.sum() / (num_sequences * response_length)
    return token_loss_R.sum() / num_sequences
