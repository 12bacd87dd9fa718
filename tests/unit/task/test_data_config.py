from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import ConfigCompositionException
from omegaconf import MISSING, OmegaConf

from megarl.config.schema.data import SCHEMAS, DataConfig, register
from megarl.task.data import SOURCES

CONF = Path(__file__).resolve().parents[3] / "conf"


@dataclass
class OnlyData:
    data: DataConfig = MISSING


def compose_data(*overrides: str) -> DataConfig:
    store = ConfigStore.instance()
    store.store(name="only_data", node=OnlyData)
    register(store)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        root = OmegaConf.to_object(compose("only_data", overrides=list(overrides)))
    assert isinstance(root, OnlyData)
    return root.data


def test_every_source_is_an_option_of_the_group_and_every_option_a_source() -> None:
    options = sorted(path.stem for path in (CONF / "data").glob("*.yaml"))
    # The keys of verifiers are otherwise those of another group.
    needed = {"verifiers": ["data.id=x", "data.args={}"], "function": ["data.path=x.py:f"]}
    assert {type(compose_data(f"+data={name}", *needed.get(name, ()))) for name in options} == set(SOURCES)
    assert set(options) >= set(SCHEMAS)


def test_a_key_of_another_source_is_an_unknown_key() -> None:
    assert compose_data("+data=jsonl", "data.path=x.jsonl").path == "x.jsonl"  # type: ignore[attr-defined]
    with pytest.raises(ConfigCompositionException, match=r"data\.heldout_path"):
        compose_data("+data=letter_count", "data.heldout_path=x.jsonl")


def test_the_task_options_of_reasoning_gym_pass_through() -> None:
    config = compose_data("+data=reasoning_gym", "data.task=gcd", "+data.options.max_value=9")
    assert config.options == {"max_value": 9}  # type: ignore[attr-defined]
