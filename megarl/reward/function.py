"""The user's own reward function, called in processes of its own."""

import re
import threading
from collections.abc import Callable
from typing import Any

from megarl.config.schema.reward import FunctionRewardConfig
from megarl.config.user_code import DescribedError, describe_error
from megarl.json_text import check_state
from megarl.reward.records import decode_prompt, decode_response, encode_prompt, encode_response, encode_score
from megarl.reward.signatures import adapt, list_columns
from megarl.sandbox.function_server import load_callable
from megarl.types import Prompt, Response, Score

RESERVED_NAMES = frozenset(
    {
        *("mean", "std", "min", "max", "correct", "positive_frac", "shaped_mean", "equal_groups_frac", "failed_frac"),
        "heldout",
    }
)
"""What the trainer itself logs under reward/."""


def serve_function(path: str, state: Any = None) -> Callable[..., dict[str, Any]]:
    """What the process calls: the user's function, from and to JSON; without a prompt it gives the function's state.

    state: what the function is to go on from; None: nothing. Raises ValueError where it cannot be loaded, takes other
    parameters than megarl, TRL or verl give, or has no place for a state that is given.
    """
    target: Any = load_callable(path)
    function = adapt(path, target)
    keeps = hasattr(target, "state_dict") and hasattr(target, "load_state_dict")
    if state is not None:
        if not keeps:
            raise ValueError(f"the checkpoint has a state of {path}, which has no state_dict and load_state_dict now")
        target.load_state_dict(state)

    def score(prompt: dict[str, Any] | None = None, response: dict[str, Any] | None = None) -> dict[str, Any]:
        if prompt is None or response is None:
            return {"state": check_state(f"reward.path={path}", target.state_dict())} if keeps else {}
        asked = decode_prompt(prompt)
        try:
            score, left_out = function(asked, decode_response(response))
            return encode_score(score) | {"left_out": left_out}
        except MemoryError:
            raise
        except Exception as error:
            raise DescribedError(_explain(path, error, asked)) from error

    return score


def _explain(path: str, error: Exception, prompt: Prompt) -> str:
    text = describe_error(error, path)
    if isinstance(error, TypeError | AttributeError) and re.search(r"'(Prompt|Response)'", str(error)):
        text += "; the texts are prompt.text and response.text, the reference answer is prompt.answer"
    columns = list_columns(prompt)
    if isinstance(error, KeyError) and columns and error.args[:1] not in [(name,) for name in columns]:
        text += f"; the columns of the data are {', '.join(sorted(columns))}"
    return text


class FunctionVerifier:
    """Holds what the user's function returns to what the means under reward/ need.

    Every Score must have the same names in `details` as the first one, that of the check before the start, and none of
    RESERVED_NAMES.
    """

    path = f"{serve_function.__module__}:{serve_function.__name__}"
    key = "reward.path"
    is_users = True

    def __init__(self, config: FunctionRewardConfig):
        self.options = {"path": config.path}
        self.timeout_s, self.memory_gb = config.timeout_s, config.memory_gb
        self._lock = threading.Lock()
        self._names: frozenset[str] | None = None
        """The names in `details` of the first Score"""
        self._left_out: set[str] = set()
        """Entries of the function's dicts that are texts"""

    def ask(self, prompt: Prompt, response: Response) -> dict[str, Any]:
        return {"prompt": encode_prompt(prompt), "response": encode_response(response)}

    def read(self, answer: Any, prompt: Prompt) -> Score:
        """Raises ValueError for other names in `details`."""
        self._left_out |= set(answer.get("left_out", ()))
        score = Score(**{name: value for name, value in answer.items() if name != "left_out"})
        if score.failure is None:
            self._check_names(frozenset(score.details))
        return score

    @property
    def notes(self) -> list[str]:
        left_out = ", ".join(sorted(self._left_out))
        return [f"of what {self.options['path']} returns, texts are not logged: {left_out}"] if left_out else []

    def give_up(self) -> None:
        """What runs out of time or memory is the function, not the response."""

    def _check_names(self, names: frozenset[str]) -> None:
        found = f"reward.path={self.options['path']}: found details {_list_names(names)}"
        reserved = names & RESERVED_NAMES
        if reserved:
            raise ValueError(f"{found}; megarl's own metrics have the names {_list_names(reserved)} under reward/")
        with self._lock:
            expected = self._names = names if self._names is None else self._names
        if names != expected:
            raise ValueError(
                f"{found}; the first response had {_list_names(expected)}, and every response must have the same"
                " (0.0 for a part that does not apply)"
            )


def _list_names(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "no names"
