"""The dataset of an environment of the package `verifiers`."""

import json
from collections.abc import Iterator
from typing import Any

from megarl.config.errors import ConfigError
from megarl.config.schema.data import VerifiersDataConfig
from megarl.data.problem import Problem, ProblemSplits
from megarl.types import Message
from megarl.verifiers_package import HELDOUT, METADATA, TRAIN, load_verifiers_environment, read_text


class VerifiersSource:
    """The rows' prompts, as the environment makes them, and its evaluation rows as the held-out ones.

    metadata["verifiers"] is JSON [part, number of the row], for environment=verifiers.
    """

    def __init__(self, config: VerifiersDataConfig):
        self.config = config

    def load(self, seed: int) -> ProblemSplits:
        """Raises ConfigError for an environment that cannot be loaded, or whose prompts are not text."""
        env = load_verifiers_environment(self.config.id, self.config.args)
        try:
            train, heldout = env.build_dataset(), env.build_eval_dataset()
        except Exception as error:  # Anybody's code, which may also need the hub.
            raise ConfigError(
                [f"data.id: the dataset of {self.config.id} raised {type(error).__name__}: {error}"]
            ) from error
        if train is None:
            raise ConfigError([f"data.id: {self.config.id} has no dataset to train on"])
        return ProblemSplits(
            list(self._read(TRAIN, train)), None if heldout is None else list(self._read(HELDOUT, heldout))
        )

    def _read(self, part: str, rows: Any) -> Iterator[Problem]:
        for number, row in enumerate(rows):
            try:
                messages = tuple(Message(str(message["role"]), read_text(message)) for message in row["prompt"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError([f"data.id: {self.config.id}, {part} row {number}: {error}"]) from error
            if not any(message.role == "user" for message in messages):
                raise ConfigError([f"data.id: {self.config.id}, {part} row {number}: no message of the user"])
            yield Problem(messages, str(row.get("answer") or ""), {METADATA: json.dumps([part, number])})
