"""The user's own reward function, called in processes of its own.

It takes megarl's (prompt, response), TRL's or verl's parameters, told apart by their names. Prompts, responses and
scores go between the processes as JSON.
"""

import base64
import inspect
import json
import math
import re
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megarl.config.errors import ConfigError
from megarl.config.schema.task import FunctionRewardConfig
from megarl.config.user_code import DescribedError, describe_error
from megarl.files import check_state
from megarl.task.process import CallError, CallRaisedError, StartError, call, load_callable
from megarl.task.reward import AnswerFailedError, ProcessReward, RewardFailedError, find_not_finite
from megarl.types import FinishReason, Message, Prompt, Response, RoutedExperts, Score, Turn, WeightVersions

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


class FunctionReward(ProcessReward):
    """Holds what the user's function returns to what the means under reward/ need.

    Every Score must have the same names in `details` as the first one, that of the check before the start, and none of
    RESERVED_NAMES. A function that keeps a state is called in one process.
    """

    path = f"{serve_function.__module__}:{serve_function.__name__}"
    key = "reward.path"
    is_users = True

    def __init__(self, config: FunctionRewardConfig):
        super().__init__(config, path=config.path)
        self._keeps_state = False
        self._names_lock = threading.Lock()
        self._names: frozenset[str] | None = None
        """The names in `details` of the first Score"""
        self._left_out: set[str] = set()
        """Entries of the function's dicts that are texts"""

    def _start(self) -> int:
        """Also finds out whether the function keeps a state."""
        count = super()._start()
        try:
            self._keeps_state = "state" in self._processes[0].call({})
        except CallError as error:
            raise ConfigError([f"{self.key}: {error}"]) from error
        if self._keeps_state and (self._config.num_workers or 1) > 1:
            raise ConfigError(
                [
                    f"reward.num_workers: {self._config.num_workers} found; the reward has state_dict and"
                    " load_state_dict, and each process would keep a state of its own: must be 1 or null"
                ]
            )
        return 1 if self._keeps_state else count

    def state(self) -> Any:
        """Of a function that keeps one; where its process has ended by a failure, it goes on from the last one."""
        if self._keeps_state:
            try:
                self._options["state"] = self._processes[0].call({})["state"]
            except CallRaisedError as error:
                raise ValueError(str(error)) from error
            except (CallError, StartError) as error:
                warnings.warn(
                    f"{self.key}: the reward's state could not be read ({error}); a checkpoint has the last one that"
                    " could",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return self._options.get("state")

    def load_state(self, state: Any) -> None:
        """A process that has started goes on from this state by being started again."""
        self._options["state"] = state
        for process in self._processes:
            process.stop()

    async def check(self, prompt: Prompt, empty: Response) -> Score:
        """Also of the reference answer: what a function does with a text is otherwise seen after the first rollout."""
        score = await self.score(prompt, empty)
        if find_not_finite(score) is None:
            stated = Response((0,), prompt.answer, (0.0,), (True,), (0,), FinishReason.stop)
            try:
                if bad := find_not_finite(await self.score(prompt, stated)):
                    raise RewardFailedError(bad)
            except RewardFailedError as error:
                raise AnswerFailedError(f"{error}, with the response {prompt.answer[:60]!r}") from error
        return score

    def list_notes(self) -> list[str]:
        left_out = ", ".join(sorted(self._left_out))
        return [f"of what {self._options['path']} returns, texts are not logged: {left_out}"] if left_out else []

    def ask(self, prompt: Prompt, response: Response) -> dict[str, Any]:
        return {"prompt": encode_prompt(prompt), "response": encode_response(response)}

    def read(self, answer: Any, prompt: Prompt) -> Score:
        """Raises ValueError for other names in `details`."""
        self._left_out |= set(answer.pop("left_out", ()))
        score = Score(**answer)
        if score.failure is None:
            self._check_names(frozenset(score.details))
        return score

    def _check_names(self, names: frozenset[str]) -> None:
        found = f"reward.path={self._options['path']}: found details {_list_names(names)}"
        reserved = names & RESERVED_NAMES
        if reserved:
            raise ValueError(f"{found}; megarl's own metrics have the names {_list_names(reserved)} under reward/")
        with self._names_lock:
            expected = self._names = names if self._names is None else self._names
        if names != expected:
            raise ValueError(
                f"{found}; the first response had {_list_names(expected)}, and every response must have the same"
                " (0.0 for a part that does not apply)"
            )


def _list_names(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "no names"


ACCEPTED = (
    "(prompt, response), TRL's (prompts, completions, **columns)"
    " or verl's (data_source, solution_str, ground_truth, extra_info)"
)
RESULTS = 'a number, True or False, a dict with "score" (or "reward"), or a megarl.types.Score'
CORRECT_AT = 1.0
"""The least score that counts as correct, where the function says nothing about it"""
TRL_ONLY = {"prompts", "completions", "completion_ids"}
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")


def adapt(path: str, function: Callable[..., Any]) -> Callable[[Prompt, Response], tuple[Score, list[str]]]:
    """The function as one from (prompt, response) to a Score and the names of the entries that are not in it; what it
    returns may be awaited.

    Raises ValueError for parameters of another sort, naming those found and what is accepted, and the function that
    comes out TypeError for another result.
    """
    parameters = _read_parameters(path, function)
    is_trl, is_verl = "completions" in parameters, "solution_str" in parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())

    def score(prompt: Prompt, response: Response) -> tuple[Score, list[str]]:
        if not is_trl and not is_verl:
            return read_result(path, call(function, prompt, response))
        given = _build_trl(prompt, response) if is_trl else _build_verl(prompt, response)
        missing = [name for name in _list_required(parameters) if name not in given]
        if missing:
            raise ValueError(
                f"reward.path={path} asks for {', '.join(missing)}; the columns of the data are"
                f" {', '.join(sorted(set(given) - TRL_ONLY))}"
            )
        result = call(function, **{name: given[name] for name in given if takes_all or name in parameters})
        if is_trl and (not isinstance(result, list | tuple) or len(result) != 1):
            raise TypeError(
                f"reward.path={path} returned {_show(result)} for one completion; TRL's functions return a list with"
                " as many numbers as there are completions"
            )
        return read_result(path, result[0] if is_trl else result)

    return score


def _read_parameters(path: str, function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Raises ValueError for those that are neither megarl's, TRL's nor verl's."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Some builtins have none.
        return {}
    parameters, why = signature.parameters, None
    if "completions" in parameters:
        if any(each.kind is inspect.Parameter.POSITIONAL_ONLY for each in parameters.values()):
            why = "; TRL gives them by name"
    elif "solution_str" in parameters:
        unknown = [name for name in _list_required(parameters) if name not in VERL]
        why = f"; verl gives no {', '.join(unknown)}" if unknown else None
    else:
        try:
            signature.bind(None, None)
        except TypeError:
            why = ""
    if why is not None:
        raise ValueError(f"{path} takes ({', '.join(map(str, parameters.values()))}){why}; accepted are {ACCEPTED}")
    return parameters


def _list_required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [name for name, each in parameters.items() if each.default is each.empty and each.kind not in variable]


def _build_trl(prompt: Prompt, response: Response) -> dict[str, Any]:
    """TRL's keywords, each a list of one: the columns of the data, prompts and completions as chats where the data's
    are."""
    is_chat = any(
        isinstance(value, list) and value and isinstance(value[0], Mapping) and "content" in value[0]
        for value in prompt.columns.values()
    )
    chat = [vars(message) for message in prompt.messages]
    columns = {"answer": prompt.answer, **list_columns(prompt)}
    return {
        **{name: [value] for name, value in columns.items() if name not in ("prompt", "completion")},
        "prompts": [chat if is_chat else prompt.messages[-1].content if prompt.messages else prompt.text],
        "completions": [[{"role": "assistant", "content": response.text}] if is_chat else response.text],
        "completion_ids": [response.token_ids.tolist()],
    }


def _build_verl(prompt: Prompt, response: Response) -> dict[str, Any]:
    """verl's keywords: columns of the data with verl's names where there are such, else what stands for them."""
    columns = list_columns(prompt)
    stated, extra = columns.get("reward_model"), columns.get("extra_info")
    truth = columns.get("ground_truth", prompt.answer)
    truth = stated.get("ground_truth", truth) if isinstance(stated, Mapping) else truth
    extra = extra if isinstance(extra, Mapping) else columns
    return dict(zip(VERL, (columns.get("data_source", ""), response.text, truth, extra), strict=True))


def list_columns(prompt: Prompt) -> dict[str, Any]:
    """The record as the data have it; of generated problems, what they have besides question and answer."""
    return dict(prompt.columns or prompt.metadata)


def read_result(path: str, result: Any) -> tuple[Score, list[str]]:
    """The Score that a function's result means, and the names of a dict's texts, which are not in it.

    Of a dict: "score" or "reward", "correct" or verl's "acc", and every other number as a detail; texts and None are
    left out. Raises TypeError for what is no result.
    """
    if isinstance(result, Score):
        return result, []
    entries = result if isinstance(result, Mapping) else {"score": result}
    name = next((name for name in ("score", "reward") if name in entries), "score")
    number = _read_number(entries.get(name))
    if number is None:
        found = dict(result) if isinstance(result, Mapping) else result
        raise TypeError(f"reward.path={path} returned {_show(found)}; it must return {RESULTS}")
    details, left_out = {}, []
    for key, value in entries.items():
        part = _read_number(value)
        if key == "correct" and value is not None and part not in (0.0, 1.0):
            raise TypeError(f"reward.path={path} returned {key!r}: {_show(value)}; it must be True or False")
        if part is None and not (value is None or (isinstance(value, str) and key != "acc")):
            raise TypeError(
                f"reward.path={path} returned {key!r}: {_show(value)}; beside {name!r} there may be numbers, which are"
                " logged as means, and texts, which are not"
            )
        if part is None:
            left_out += [str(key)] if value is not None else []
        elif key not in (name, "correct"):
            details[str(key)] = part
    stated = next((_read_number(entries[key]) for key in ("correct", "acc") if entries.get(key) is not None), None)
    given = entries[name]
    correct = (given if isinstance(given, bool) else number >= CORRECT_AT) if stated is None else stated >= CORRECT_AT
    return Score(number, correct, details), left_out


def _read_number(value: Any) -> float | None:
    """Also an array or tensor of one number; None for what is no number."""
    if not isinstance(value, Real) and getattr(value, "shape", None) in ((), (1,)):
        value = value.item()
    try:
        return float(value) if isinstance(value, Real | Decimal) else None
    except OverflowError:  # An integer of hundreds of digits.
        return math.inf if value > 0 else -math.inf


def _show(value: Any, length: int = 60) -> str:
    text = repr(value)
    return f"{text if len(text) <= length else text[:length] + '...'} ({type(value).__name__})"


_ARRAYS: dict[str, type[np.generic]] = {"token_ids": np.int32, "rollout_logprobs": np.float32, "generated": np.bool_}


def encode_prompt(prompt: Prompt) -> dict[str, Any]:
    """All that a prompt has."""
    return {
        **vars(prompt),
        "token_ids": _encode(prompt.token_ids, np.int32),
        "metadata": dict(prompt.metadata),
        # May hold what JSON has no type for, such as dates.
        "columns": json.dumps(dict(prompt.columns), default=str),
        "messages": [vars(message) for message in prompt.messages],
    }


def decode_prompt(record: dict[str, Any]) -> Prompt:
    """The prompt that `encode_prompt` was given."""
    token_ids = tuple(_decode(record["token_ids"], np.int32).tolist())
    messages = tuple(Message(**message) for message in record["messages"])
    columns = json.loads(record["columns"])
    return Prompt(**{**record, "token_ids": token_ids, "messages": messages, "columns": columns})


def encode_response(response: Response) -> dict[str, Any]:
    """All that a response has; arrays are base64 of their bytes, which costs 14 bytes a token."""
    versions, experts = response.weight_versions, response.routed_experts
    return {
        **{name: _encode(getattr(response, name), dtype) for name, dtype in _ARRAYS.items()},
        "text": response.text,
        "weight_versions": vars(versions),
        "finish_reason": response.finish_reason.value,
        "routed_experts": experts and {**vars(experts), "data": base64.b64encode(experts.data).decode()},
        "turns": [{**vars(turn), "details": dict(turn.details)} for turn in response.turns],
    }


def decode_response(record: dict[str, Any]) -> Response:
    """The response that `encode_response` was given."""
    experts = record["routed_experts"]
    versions = {name: tuple(values) for name, values in record["weight_versions"].items()}
    return Response(
        **{name: _decode(record[name], dtype) for name, dtype in _ARRAYS.items()},
        text=record["text"],
        weight_versions=WeightVersions(**versions),
        finish_reason=FinishReason(record["finish_reason"]),
        routed_experts=experts and RoutedExperts(**{**experts, "data": base64.b64decode(experts["data"])}),
        turns=tuple(Turn(**turn) for turn in record["turns"]),
    )


def encode_score(score: Score) -> dict[str, Any]:
    """All that a score has, as plain numbers. Raises TypeError and ValueError for what is not a number."""
    return {
        **{field.name: getattr(score, field.name) for field in fields(score)},
        "reward": float(score.reward),
        "correct": _read_truth(score.correct),
        "details": {str(name): float(value) for name, value in score.details.items()},
    }


def _read_truth(value: Any) -> bool:
    # The text "False" is true to Python, and so is NaN.
    if isinstance(value, str) or value not in (0, 1):
        raise TypeError(f"a Score has the correct {value!r}; it must be True or False")
    return bool(value)


def _encode(values: ArrayLike, dtype: type[np.generic]) -> str:
    return base64.b64encode(np.ascontiguousarray(values, dtype=dtype).tobytes()).decode()


def _decode(text: str, dtype: type[np.generic]) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype=dtype)
