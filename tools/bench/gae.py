"""Times the vectorised GAE on ragged float32 batches, beside the loops it replaces.

Run: python tools/bench/gae.py [--rows 1024] [--positions 8192] [--scalar-rows 128]
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from megarl.algo.advantages.gae import compute_gae

GAMMA, LAMBDA = 1.0, 0.95
GOAL_SCALAR, GOAL_COLUMNS = 10.0, 5.0


def make_batch(num_rows: int, num_positions: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, num_positions + 1, (num_rows,), generator=generator)
    lengths[0] = num_positions
    mask = torch.arange(num_positions) < lengths[:, None]
    values = torch.rand(num_rows, num_positions, generator=generator) * mask
    rewards = torch.zeros(num_rows, num_positions)
    rewards[torch.arange(num_rows), lengths - 1] = 1.0
    return rewards, values, mask


def gae_by_token(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """One Python step per generated token, over lists."""
    out = torch.zeros_like(values)
    for row, length in enumerate(mask.sum(1).tolist()):
        r, v = rewards[row, :length].tolist(), values[row, :length].tolist()
        found, advantage, next_value = [0.0] * length, 0.0, 0.0
        for t in range(length - 1, -1, -1):
            advantage = r[t] + GAMMA * next_value - v[t] + GAMMA * LAMBDA * advantage
            found[t], next_value = advantage, v[t]
        out[row, :length] = torch.tensor(found)
    return out


def gae_by_position(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """One step per position, vectorised over the batch, as RL frameworks write it."""
    advantage, columns = torch.zeros(len(values)), []
    for t in range(values.shape[1] - 1, -1, -1):
        next_value = values[:, t + 1] if t + 1 < values.shape[1] else 0.0
        advantage = rewards[:, t] + GAMMA * next_value - values[:, t] + GAMMA * LAMBDA * advantage
        columns.append(advantage)
    return torch.stack(columns[::-1], dim=1) * mask


def gae_vectorised(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return compute_gae(rewards, values, mask, GAMMA, LAMBDA)


def gae_vectorised_per_row(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return compute_gae(rewards, values, mask, GAMMA, torch.full((len(values),), LAMBDA))


def best_times(functions: list[Callable[..., Tensor]], batch: tuple[Tensor, ...], repeats: int) -> list[float]:
    """Seconds of each function's fastest run; the runs alternate, so that a busy machine slows all alike."""
    times = [float("inf")] * len(functions)
    for _ in range(repeats):
        for i, function in enumerate(functions):
            start = time.perf_counter()
            function(*batch)
            times[i] = min(times[i], time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--positions", type=int, default=8192)
    parser.add_argument("--scalar-rows", type=int, default=128, help="rows of the batch for the per-token loop")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    batch = make_batch(args.rows, args.positions)
    few = tuple(t[: args.scalar_rows].clone() for t in batch)
    for function in (gae_by_token, gae_by_position):
        expected, found = function(*few), gae_vectorised(*few)
        print(f"largest difference from {function.__name__}: {(expected - found).abs().max():.2e}")
    scalar, ours_few = best_times([gae_by_token, gae_vectorised], few, args.repeats)
    columns, ours, ours_per_row = best_times(
        [gae_by_position, gae_vectorised, gae_vectorised_per_row], batch, args.repeats
    )
    print(f"{args.scalar_rows} x {args.positions}: per token {scalar:.4f} s, vectorised {ours_few:.4f} s")
    print(
        f"{args.rows} x {args.positions}: per position {columns:.4f} s, vectorised {ours:.4f} s, "
        f"with a lambda per row {ours_per_row:.4f} s"
    )
    print(f"per token / vectorised: {scalar / ours_few:.1f} (goal {GOAL_SCALAR:g})")
    print(f"ratio: {columns / max(ours, ours_per_row):.1f} goal: {GOAL_COLUMNS:g}")


if __name__ == "__main__":
    main()
