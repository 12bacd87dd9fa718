"""The pure parts of the loop."""

import torch

from megarl.config.load import load_config
from megarl.run.components import average_steps, split_minibatches


def test_metrics_of_optimizer_steps_are_averaged_over_those_that_have_them_maxima_kept_and_sums_added():
    steps = [{"loss": 1.0, "ratio_max": 3.0, "a_sum": 1.0}, {"loss": 3.0, "ratio_max": 2.0, "a_sum": 3.0, "b": 2.0}]
    assert average_steps(steps) == {"loss": 2.0, "ratio_max": 3.0, "a_sum": 4.0, "b": 2.0}


def test_every_epoch_has_all_rows_in_an_order_of_its_own_and_the_same_seed_the_same():
    config = load_config(["train.epochs_per_iteration=3", "train.num_minibatches=2"])
    num = 2 * config.train.minibatch_size
    minibatches = split_minibatches(config, num, 1)
    epochs = [torch.cat(minibatches[first : first + 2]).tolist() for first in (0, 2, 4)]
    assert [sorted(rows) for rows in epochs] == [list(range(num))] * 3
    assert len({tuple(rows) for rows in epochs}) == 3
    assert all(map(torch.equal, split_minibatches(config, num, 1), minibatches))
    assert not all(map(torch.equal, split_minibatches(config, num, 2), minibatches))
