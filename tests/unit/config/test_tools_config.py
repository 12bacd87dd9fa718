"""The checks of environment=tools."""

from megarl.api import compose


def test_the_calculator_experiment_is_one_override() -> None:
    config = compose("experiment=calculator")
    assert (config.model.name, config.algo.name) == ("smollm2_135m", "lite_ppo")
    assert type(config.environment).__name__ == "ToolsEnvironmentConfig"
    assert config.data.system == ""
