"""Overrides and what they compose to (composed.yaml), or the message by which they are refused (refused.yaml)."""

from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.config.errors import ConfigError
from megarl.config.load import expand_sweep, load_config


def read_table(name: str) -> list[Any]:
    """A parameter (claim, row) for each row; a row of one word may be the word alone."""
    table = yaml.safe_load(Path(__file__).with_name(name).read_text())
    rows = [(claim, row if isinstance(row, list) else [row]) for claim, rows in table.items() for row in rows]
    return [pytest.param(claim, row, id=f"{claim}-{'-'.join(map(str, row))}") for claim, row in rows]


COMPOSED, REFUSED = read_table("composed.yaml"), read_table("refused.yaml")


@pytest.mark.parametrize(("claim", "row"), COMPOSED)
def test_it_composes_to_the_values(claim: str, row: list[Any]) -> None:
    *overrides, expected = row
    config = load_config(overrides)
    found = {key: reduce(getattr, key.split("."), config) for key in expected}
    assert {key: getattr(value, "name", value) for key, value in found.items()} == expected, claim


@pytest.mark.parametrize(("claim", "row"), REFUSED)
def test_it_is_refused_with_the_message(claim: str, row: list[str]) -> None:
    overrides, message = (row[:-1], row[-1]) if len(row) > 1 else (row, row[0].split("=")[0] + ": found ")
    for run in expand_sweep(overrides):
        with pytest.raises(ConfigError) as caught:
            load_config(run)
        assert message in str(caught.value), claim
        if len(row) == 1:  # once
            assert len([problem for problem in caught.value.problems if problem.startswith(message)]) == 1
