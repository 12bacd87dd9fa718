"""A number of ranks per server that the model does not divide into is refused before anything starts."""

import pytest

from megarl.config.errors import ConfigError
from megarl.config.load import load_config
from megarl.run.inputs import load_models, load_specs


def test_ranks_of_a_server_that_the_heads_do_not_divide_into_are_refused_with_the_nearest_number() -> None:
    config = load_config(["model=tiny", "rollout.tp=3"])
    with pytest.raises(ConfigError, match=r"rollout.tp: found 3, which does not divide .*; the nearest that does is 2"):
        load_specs(config, load_models(config))


def test_a_bucket_size_without_a_link_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout.sync_bucket_mb: .*with rollout.transport=disk"):
        load_config(["model=tiny", "rollout.transport=disk", "rollout.sync_bucket_mb=8"])
