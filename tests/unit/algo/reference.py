"""The formulas again, in plain Python loops over float64 numbers. Shares no code with megarl.algo.

Rows are lists, one entry per response position; `m` marks the generated ones. Policy losses are written over scalar
torch tensors so that autograd differentiates them; VAPO's gradient is derived by hand as well.
"""

import math
from types import SimpleNamespace

import torch

EPS = 1e-6


def mean(xs):
    return math.fsum(xs) / len(xs)


def std(xs):
    mu = mean(xs)
    return math.sqrt(math.fsum((x - mu) ** 2 for x in xs) / len(xs))


def gae_row(rewards, values, m, gamma, lam, by_turn=False):
    """Backwards over the generated tokens only. by_turn: a token that follows at once is no step."""
    out = [0.0] * len(m)
    next_advantage = next_value = 0.0
    for t in reversed(range(len(m))):
        if not m[t]:
            continue
        within = by_turn and t + 1 < len(m) and m[t + 1]
        discount, decay = (1.0, 1.0) if within else (gamma, lam)
        delta = rewards[t] + discount * next_value - values[t]
        out[t] = delta + discount * decay * next_advantage
        next_advantage, next_value = out[t], values[t]
    return out


def policy_row(rewards, values, m, algo):
    """By its definition, a sum over the later TD errors: l steps later one counts (1 - floor) lambda^l + floor."""
    lam, by_turn = algo.lambda_policy, algo.lambda_level.name == "turn"
    if lam == "adaptive":
        lam = adaptive_lambda(sum(m), algo.length_alpha, algo.lambda_min)
    errors, out = [0.0] * len(m), [0.0] * len(m)
    ts = [t for t in range(len(m)) if m[t]]
    for t, after in zip(ts, [*ts, None][1:], strict=True):
        discount = 1.0 if by_turn and after == t + 1 else algo.gamma
        errors[t] = rewards[t] + (0.0 if after is None else discount * values[after]) - values[t]
    for t in range(len(m)):
        steps, discount = 0, 1.0
        for u in range(t, len(m) if m[t] else t):
            if u > t and (m[u] and not (by_turn and m[u - 1])):
                steps, discount = steps + 1, discount * algo.gamma
            if m[u]:
                out[t] += discount * ((1 - algo.lambda_floor) * lam**steps + algo.lambda_floor) * errors[u]
    return out


def reward_to_go_row(rewards, m, gamma):
    """By its definition, a sum over the generated tokens from t on."""
    ts = [t for t in range(len(m)) if m[t]]
    out = [0.0] * len(m)
    for i, t in enumerate(ts):
        out[t] = math.fsum(gamma ** (j - i) * rewards[ts[j]] for j in range(i, len(ts)))
    return out


def adaptive_lambda(length, alpha, low):
    return min(1.0, max(low, 1.0 - 1.0 / (alpha * length))) if length else low


def members(groups, i):
    return [j for j in range(len(groups)) if groups[j] == groups[i]]


def rloo(returns, groups):
    out = []
    for i in range(len(returns)):
        peers = [returns[j] for j in members(groups, i) if j != i]
        out.append(returns[i] - mean(peers))
    return out


def group_relative(returns, groups, divide, std_of):
    own = [[returns[j] for j in members(groups, i)] for i in range(len(returns))]
    centered = [r - mean(g) if max(g) > min(g) else 0.0 for r, g in zip(returns, own, strict=True)]
    if divide == "group":
        return [c / (std(g) + EPS) for c, g in zip(centered, own, strict=True)]
    if divide == "batch":
        sigma = std(centered if std_of == "centered" else returns)
        return [c / (sigma + EPS) for c in centered]
    return centered


def normalise(rewards, groups, mean_of, std_of, seen=()):
    """seen: every reward of the run so far, these included (for the scope running)."""
    out = []
    for i, r in enumerate(rewards):
        sets = {"batch": rewards, "group": [rewards[j] for j in members(groups, i)], "running": list(seen)}
        for scope in (mean_of, std_of):
            # Less the mean of other rewards too, equal ones need not be 0; over a std of 0 they are.
            if scope == "none" or (scope == "running" and std_of != "running"):
                continue
            if max(sets[scope]) == min(sets[scope]):
                out.append(0.0)
                break
        else:
            r = r - mean(sets[mean_of]) if mean_of != "none" else r
            out.append(r / (std(sets[std_of]) + EPS) if std_of != "none" else r)
    return out


def whiten(rows, masks):
    inside = [a for row, m in zip(rows, masks, strict=True) for a, g in zip(row, m, strict=True) if g]
    if not inside or max(inside) == min(inside):
        return [[0.0] * len(row) for row in rows]
    mu, sigma = mean(inside), std(inside)
    return [
        [(a - mu) / (sigma + EPS) if g else 0.0 for a, g in zip(row, m, strict=True)]
        for row, m in zip(rows, masks, strict=True)
    ]


def kl(d, estimator):
    """Of floats or of torch scalars."""
    exp = torch.exp if isinstance(d, torch.Tensor) else math.exp
    return {"k1": lambda: d, "abs": lambda: abs(d), "k2": lambda: d * d / 2, "k3": lambda: exp(-d) + d - 1}[estimator]()


def penalise(batch, algo, response_length, wrong):
    rewards = [wrong + (1 - wrong) * r for r in batch.rewards]
    if algo.reward_norm.parts:
        rewards = [0.0] * len(rewards)
        for k, weight in enumerate(algo.reward_norm.parts.values()):
            for i, r in enumerate(batch.reward_parts):
                peers = [batch.reward_parts[j][k] for j in members(batch.groups, i)]
                rewards[i] += weight * (r[k] - mean(peers)) / (std(peers) + EPS)
    if algo.overlong.penalty:
        overlong = algo.overlong
        buffer = round(overlong.buffer_frac * response_length)
        for i, length in enumerate(batch.lengths):
            over = length - (response_length - buffer)
            rewards[i] -= algo.overlong.penalty * min(max(over / buffer, 0.0), 1.0)
    return rewards


def shape_rewards(batch, algo, response_length, wrong=0.0):
    rewards = penalise(batch, algo, response_length, wrong)
    rewards = normalise(rewards, batch.groups, algo.reward_norm.mean.name, algo.reward_norm.std.name)
    if algo.reward_clip is not None:
        rewards = [min(max(r, -algo.reward_clip), algo.reward_clip) for r in rewards]
    return rewards


def kl_penalties(batch, algo, kl_coef):
    """beta * k per token of the reward or, of estimator k1, of the advantage; 0 where there is none."""
    out = []
    for i, m in enumerate(batch.mask):
        row = [0.0] * len(m)
        for t in range(len(m)):
            if m[t] and (algo.kl.in_reward or algo.kl.in_advantage):
                name = algo.kl.reward_estimator.name if algo.kl.in_reward else "k1"
                row[t] = (kl_coef if algo.kl.in_reward else algo.kl.advantage_coef) * (
                    batch.ref_kl[i][t] if name == "full" else kl(batch.old[i][t] - batch.ref[i][t], name)
                )
        out.append(row)
    return out


def adapted_coef(coef, mean_kl, target, horizon, num_samples):
    error = mean_kl / target - 1
    if error > 0.2:
        error = 0.2
    if error < -0.2:
        error = -0.2
    return coef + coef * error * num_samples / horizon


def turn_scales(batch, algo, response_length, wrong):
    """What a reward of each response's turns is multiplied with."""
    rewards, scope = penalise(batch, algo, response_length, wrong), algo.reward_norm.std.name
    out = []
    for i in range(len(rewards)):
        peers = rewards if scope == "batch" else [rewards[j] for j in members(batch.groups, i)]
        divisor = 1.0 if scope == "none" else std(peers) + EPS
        equal = scope != "none" and max(peers) == min(peers)
        out.append(0.0 if equal else (1 - wrong) / divisor)
    return out


def spread_rewards(rewards, penalties, masks, turns):
    """The turns' at their ends, the rest at the last generated token, minus the penalties."""
    out = []
    for r, row, m, turn in zip(rewards, penalties, masks, turns, strict=True):
        last = max((t for t in range(len(m)) if m[t]), default=None)
        rest = r - math.fsum(turn)
        out.append([(rest if t == last else 0.0) + turn[t] - p for t, p in enumerate(row)])
    return out


def gae_targets(token_rewards, batch, algo):
    advantages, returns = [], []
    by_turn = algo.lambda_level.name == "turn"
    for r, v, m in zip(token_rewards, batch.values, batch.mask, strict=True):
        advantages.append(policy_row(r, v, m, algo))
        to_critic = gae_row(r, v, m, algo.gamma, algo.lambda_critic, by_turn)
        returns.append([to_critic[t] + v[t] if m[t] else 0.0 for t in range(len(m))])
    return advantages, returns


def targets(batch, algo, kl_coef, response_length=None, wrong=0.0):
    """batch: groups, rewards, truncated, mask, old, ref, values, lengths (all tokens) as lists."""
    rewards = shape_rewards(batch, algo, response_length, wrong)
    penalties = own_penalties = kl_penalties(batch, algo, kl_coef)
    if algo.kl.in_advantage:
        penalties = [[0.0] * len(m) for m in batch.mask]
    turns = [[0.0] * len(m) for m in batch.mask]
    if batch.turn_rewards is not None:
        scales = turn_scales(batch, algo, response_length, wrong)
        turns = [[scale * r for r in row] for scale, row in zip(scales, batch.turn_rewards, strict=True)]
    token_rewards = spread_rewards(rewards, penalties, batch.mask, turns)
    total = [r - math.fsum(row) for r, row in zip(rewards, penalties, strict=True)]
    returns = fitted = None
    kind = algo.advantage
    if kind == "gae":
        advantages, returns = gae_targets(token_rewards, batch, algo)
    elif kind == "tether":
        advantages, returns, fitted = tether_targets(token_rewards, total, batch, algo)
    elif kind == "control_variate":
        advantages, returns = control_variate_targets(token_rewards, total, batch, algo)
    elif kind == "reinforce":
        rows = zip(token_rewards, batch.mask, strict=True)
        advantages = [reward_to_go_row(r, m, algo.gamma) for r, m in rows]
    elif kind == "none":
        advantages = [[0.0] * len(m) for m in batch.mask]
    else:
        if kind == "rloo":
            one = rloo(total, batch.groups)
        else:
            one = group_relative(total, batch.groups, algo.advantage_std.name, algo.std_of.name)
        advantages = [[a if g else 0.0 for g in m] for a, m in zip(one, batch.mask, strict=True)]
    if algo.whiten_advantages:
        advantages = whiten(advantages, batch.mask)
    if algo.kl.in_advantage:
        pairs = [list(zip(row, own, strict=True)) for row, own in zip(advantages, own_penalties, strict=True)]
        advantages = [[a - p for a, p in row] for row in pairs]
    if algo.advantage_clip is not None:
        c = algo.advantage_clip
        advantages = [[min(max(a, -c), c) for a in row] for row in advantages]
    keep = [not (cut and algo.overlong.filter) for cut in batch.truncated]
    return SimpleNamespace(
        advantages=advantages,
        returns=returns,
        fitted=fitted,
        loss_mask=[[g and k for g in m] for m, k in zip(batch.mask, keep, strict=True)],
        positive=[r >= algo.positive_threshold for r in batch.rewards],
    )


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
    if algo.surrogate == "sapo":
        tau = algo.surrogate_options.get("tau_positive", 1.0) if a > 0 else 1.05
        return -4 / tau * a / (1 + torch.exp(-tau * (w - 1)))
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


def weights(mode, loss_mask, mask, response_length):
    """The factor of each row's tokens: [row]."""
    num_tokens = sum(map(sum, loss_mask))
    num_sequences = sum(any(row) for row in loss_mask)
    out = []
    for m in mask:
        out.append(
            {
                "token-mean": lambda: 1 / max(num_tokens, 1),
                "seq-mean-token-sum": lambda: 1 / max(num_sequences, 1),
                "seq-mean-token-mean": lambda m=m: 1 / (max(num_sequences, 1) * max(sum(m), 1)),
                "seq-mean-token-sum-norm": lambda: 1 / (max(num_sequences, 1) * response_length),
            }[mode]()
        )
    return out


def taper_metrics(lp, s, algo):
    """Mean, share below 0.01 and share above 0.99, over the tokens of A < 0."""
    tapers = [
        taper(lp[i], s, i, t, algo)
        for i, row in enumerate(s.loss_mask)
        for t, counted in enumerate(row)
        if counted and s.advantages[i][t] < 0
    ]
    return [mean(tapers), mean([x < 0.01 for x in tapers]), mean([x > 0.99 for x in tapers])] if tapers else None


def policy_loss(lp, entropy, s, algo, response_length, full=None):
    """lp, entropy, full (KL over the vocabulary): float64 [B, T]; s: lists mask, loss_mask, positive, advantages, old,
    rollout, ref.
    """
    factor = weights(algo.loss_agg_mode.value, s.loss_mask, s.mask, response_length)
    total = torch.zeros((), dtype=torch.float64)
    num_positive = sum(sum(row) for row, p in zip(s.loss_mask, s.positive, strict=True) if p)
    num_tokens = sum(map(sum, s.loss_mask))
    for i, row in enumerate(s.loss_mask):
        c = mismatch_weights(s, i, algo) if algo.mismatch.correction.name != "none" else [1.0] * len(row)
        for t, counted in enumerate(row):
            if not counted:
                continue
            x = lp[i, t]
            loss = algo.rl_loss_coef * c[t] * surrogate(lp[i], s, i, t, algo)
            if algo.topr.positive_loss_coef or algo.topr.negative_loss_coef:
                loss = loss + topr(lp[i], s, i, t, algo)
            if algo.kl.in_loss:
                name = algo.kl.loss_estimator.name
                loss = loss + algo.kl.loss_coef * (full[i, t] if name == "full" else kl(x - s.ref[i][t], name))
            if algo.entropy_coef:
                loss = loss - algo.entropy_coef * entropy[i, t]
            total = total + factor[i] * loss
            if s.positive[i] and algo.positive_lm_coef:
                over = num_positive if algo.positive_lm_mean_over.name == "positive_tokens" else num_tokens
                total = total - algo.positive_lm_coef * x / over
    return total


def value_loss(v, g, algo, value_range):
    """Of a torch scalar and a number."""
    if algo.value_loss.name == "squared":
        return 0.5 * (v - g) ** 2
    low, high = value_range
    p, y = (v - low) / (high - low), min(max((g - low) / (high - low), 0.0), 1.0)
    p = torch.clamp(p, 1e-6, 1 - 1e-6)
    return -torch.log(p**y * (1 - p) ** (1 - y))


def critic_loss(values, s, algo, value_range=None):
    """values: float64 [B, T]; s: lists mask, loss_mask, returns, old_values."""
    mask = s.loss_mask if algo.overlong.filter_critic else s.mask
    factor = weights(algo.value_loss_agg_mode.value, mask, s.mask, None)
    total = torch.zeros((), dtype=torch.float64)
    for i, row in enumerate(mask):
        for t, counted in enumerate(row):
            if not counted:
                continue
            v, g = values[i, t], s.returns[i][t]
            loss = value_loss(v, g, algo, value_range)
            if algo.value_clip is not None:
                old = s.old_values[i][t]
                near = v.clamp(old - algo.value_clip, old + algo.value_clip)
                loss = torch.maximum(loss, value_loss(near, g, algo, value_range))
            total = total + factor[i] * loss
    return total


def tether_targets(token_rewards, total, batch, algo):
    """TETHER's advantages, returns, and the weight fitted to the batch (None: any fits as well): the vertex of the
    parabola through the sums of squares at three weights. total: of each response's rewards.
    """
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


def control_variate_targets(token_rewards, total, batch, algo):
    """GAE with w V + (1 - w) (mean of the others - the rewards so far) for V; w of least squares over the other
    prompts."""
    n, groups, to_go = len(total), batch.groups, []
    whole = len(set(groups)) == n
    peers = [[total[j] for j in range(n) if j != i and (whole or groups[j] == groups[i])] for i in range(n)]
    for r, m in zip(token_rewards, batch.mask, strict=True):
        to_go.append(reward_to_go_row(r, m, 1.0))

    def fit(i):
        pairs = [
            (total[j] - mean(peers[j]), to_go[j][t] - batch.values[j][t])
            for j in range(n)
            if groups[j] != groups[i] and peers[j]
            for t in range(len(batch.mask[j]))
            if batch.mask[j][t]
        ]
        square = math.fsum((a - v) ** 2 for a, v in pairs)
        return min(max(math.fsum(a * (a - v) for a, v in pairs) / square, 0.0), 1.0) if square else 0.0

    advantages, returns = [], []
    for i, (m, r, v) in enumerate(zip(batch.mask, token_rewards, batch.values, strict=True)):
        w = fit(i) if peers[i] else 1.0
        ahead = [mean(peers[i]) - total[i] + g if peers[i] else 0.0 for g in to_go[i]]
        advantages.append(policy_row(r, [(1 - w) * b + w * x for b, x in zip(ahead, v, strict=True)], m, algo))
        to_critic = gae_row(r, v, m, 1.0, algo.lambda_critic)
        returns.append([to_critic[t] + v[t] if m[t] else 0.0 for t in range(len(m))])
    return advantages, returns


def explained_variance(values, returns):
    spread = std(returns) ** 2
    return 1 - std([g - v for g, v in zip(returns, values, strict=True)]) ** 2 / spread if spread else 0.0
