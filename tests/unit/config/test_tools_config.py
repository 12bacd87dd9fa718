"""The checks of environment=tools."""

import pytest

from megarl.api import compose
from megarl.config.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("environment.max_calls=6",), r"environment\.step_deadline_s: found 60; .* = 60 s, and it must be above"),
        (("data=addition",), r"data\.response_prefix: found a text with environment=tools"),
        (("environment.num_processes=0",), r"environment\.num_processes: found 0; it must be 1 or more"),
        (("environment.call_timeout_s=0",), r"environment\.call_timeout_s: found 0"),
        (("environment.tools=calculator",), r"environment\.tools"),
    ],
)
def test_a_configuration_of_tools_that_contradicts_itself_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose("environment=tools", *overrides)


def test_the_calculator_experiment_is_one_override() -> None:
    config = compose("experiment=calculator")
    assert (config.model.name, config.algo.name) == ("smollm2_135m", "lite_ppo")
    assert type(config.environment).__name__ == "ToolsEnvironmentConfig"
    assert config.data.system == ""
