"""The terms of the policy's loss for one token, over scalar float64 torch tensors: a part of reference.py."""

import math

import torch


def bounded(ratio, low, high, how):
    if how == "tis":
        return min(ratio, high)
    return ratio if low <= ratio <= high else 0.0


def mismatch_weights(s, i, algo):
    d = [s.old[i][t] - s.rollout[i][t] if g else 0.0 for t, g in enumerate(s.mask[i])]
    level, c = algo.mismatch.level.name, algo.mismatch
    if level != "token":
        total = math.fsum(d) / (max(sum(s.mask[i]), 1) if level == "geometric" else 1)
        d = [total] * len(d)
    return [bounded(math.exp(x), c.low, c.high, c.correction.name) for x in d]


def trusted(lp, s, i, t, algo):
    """DIS and DPPO, of scalars: each 0 where the token has left its trust region."""
    a, r = s.advantages[i][t], math.exp(lp.item() - s.rollout[i][t])
    if algo.surrogate == "dis":
        return -r * a * lp if 1 - algo.clip_low < r < 1 + algo.clip_high else 0.0 * lp
    mu = math.exp(s.rollout[i][t])
    low, high = 1 - algo.clip_low / mu, 1 + algo.clip_high / mu
    inside = min(r * a, min(max(r, low), high) * a) == r * a
    return -torch.exp(lp - s.rollout[i][t]) * a if inside else 0.0 * lp


def surrogate(lp_row, s, i, t, algo):
    lp, old, a = lp_row[t], s.old[i][t], s.advantages[i][t]
    if algo.surrogate == "logprob":
        return -a * lp
    if algo.surrogate in ("dis", "dppo"):
        return trusted(lp, s, i, t, algo)
    if algo.surrogate == "cispo":
        return -min(max(math.exp(lp.item() - old), 1 - algo.clip_low), 1 + algo.clip_high) * a * lp
    w = torch.exp(lp - old)
    if algo.surrogate == "gspo":
        logs = [lp_row[k] - s.old[i][k] for k in range(len(lp_row)) if s.mask[i][k]]
        w = torch.exp(sum(logs) / len(logs))
    best = torch.minimum(w * a, torch.clamp(w, 1 - algo.clip_low, 1 + algo.clip_high) * a)
    if a < 0 and algo.dual_clip is not None:
        best = torch.maximum(best, torch.tensor(algo.dual_clip * a, dtype=torch.float64))
    return -best


def topr(lp_row, s, i, t, algo):
    a = s.advantages[i][t]
    if a >= 0:
        return -algo.topr.positive_loss_coef * a * lp_row[t]
    return -algo.topr.negative_loss_coef * taper(lp_row, s, i, t, algo) * a * lp_row[t]


def taper(lp_row, s, i, t, algo):
    level = algo.topr.ratio_level.name
    ts = [t] if level == "token" else [k for k in range(len(lp_row)) if s.mask[i][k]]
    log_rho = math.fsum(lp_row[k].item() - s.sampling[i][k] for k in ts)
    return math.exp(min(log_rho / (len(ts) if level == "geometric" else 1), 0.0))
