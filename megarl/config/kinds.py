"""The chosen options of data= and reward=, as a message names them."""

from megarl.config.schema import data, reward
from megarl.config.schema.data import DataConfig
from megarl.config.schema.reward import RewardConfig


def name_data(config: DataConfig) -> str:
    """`data=jsonl data.path=train.jsonl`, `data=addition`."""
    if (path := getattr(config, "path", None)) and path.startswith(data.TOYS):
        return f"data={path.removeprefix(data.TOYS)}"
    kind = next((name for name, schema in data.SCHEMAS.items() if schema is type(config)), "...")
    return f"data={kind}{_name_path('data', config)}"


def name_reward(config: RewardConfig) -> str:
    """`reward=function reward.path=my_reward.py:score`."""
    kind = next((name for name, schema in reward.SCHEMAS.items() if schema is type(config)), "...")
    return f"reward={kind}{_name_path('reward', config)}"


def _name_path(group: str, config: object) -> str:
    path = getattr(config, "path", None)
    return f" {group}.path={path}" if path else ""
