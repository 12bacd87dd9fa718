"""TETHER by another way than megarl's, in plain Python: see reference.py."""

import math

from reference import gae_row, kl_penalties, mean, members, reward_to_go_row, shape_rewards, spread_rewards, turn_scales


def targets(batch, algo, kl_coef, response_length=None, wrong=0.0):
    """Advantages, returns, and the weight fitted to the batch (None: any fits as well): the vertex of the parabola
    through the sums of squares at three weights.
    """
    rewards, penalties = shape_rewards(batch, algo, response_length, wrong), kl_penalties(batch, algo, kl_coef)
    turns = [[0.0] * len(m) for m in batch.mask]
    if batch.turn_rewards is not None:
        scales = turn_scales(batch, algo, response_length, wrong)
        turns = [[scale * r for r in row] for scale, row in zip(scales, batch.turn_rewards, strict=True)]
    token_rewards = spread_rewards(rewards, penalties, batch.mask, turns)
    total = [r - math.fsum(row) for r, row in zip(rewards, penalties, strict=True)]
    others = [[total[j] for j in members(batch.groups, i) if j != i] for i in range(len(total))]
    by_group = [r - mean(peers) if peers else 0.0 for r, peers in zip(total, others, strict=True)]

    def mix(rho):
        out = []
        for a, r, v, m in zip(by_group, token_rewards, batch.values, batch.mask, strict=True):
            to_go = reward_to_go_row(r, m, 1.0)
            out.append([(1 - rho) * a + rho * (to_go[t] - v[t]) if m[t] else 0.0 for t in range(len(m))])
        return out

    zero, half, one = (
        math.fsum(a * a for row, peers in zip(mix(rho), others, strict=True) if peers for a in row)
        for rho in (0.0, 0.5, 1.0)
    )
    curvature = 2 * zero + 2 * one - 4 * half
    fitted = min(max((zero + curvature - one) / (2 * curvature), 0.0), 1.0) if curvature > 1e-12 else None
    returns = []
    for r, v, m in zip(token_rewards, batch.values, batch.mask, strict=True):
        to_critic = gae_row(r, v, m, 1.0, algo.lambda_critic)
        returns.append([to_critic[t] + v[t] if m[t] else 0.0 for t in range(len(m))])
    return mix(algo.tether.initial), returns, fitted
