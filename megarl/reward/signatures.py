"""Reward functions as people have them: megarl's (prompt, response), TRL's and verl's, by the names of parameters."""

import inspect
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from numbers import Real
from typing import Any

from megarl.sandbox.function_server import call
from megarl.types import Prompt, Response, Score

ACCEPTED = (
    "(prompt, response), TRL's (prompts, completions, **columns)"
    " or verl's (data_source, solution_str, ground_truth, extra_info)"
)
RESULTS = 'a number, True or False, a dict with "score" (or "reward"), or a megarl.types.Score'
CORRECT_AT = 1.0
"""The least score that counts as correct, where the function says nothing about it"""
_SCORE_KEYS = ("score", "reward")
_TRL_ONLY = ("prompts", "completions", "completion_ids")
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")

Parameters = Mapping[str, inspect.Parameter]


def adapt(path: str, function: Callable[..., Any]) -> Callable[[Prompt, Response], tuple[Score, list[str]]]:
    """The function as one from (prompt, response) to a Score and the names of the entries that are not in it; what it
    returns may be awaited.

    Raises ValueError for parameters of another sort, naming those found and what is accepted, and the function that
    comes out TypeError for another result.
    """
    arguments = _find_arguments(path, function)

    def score(prompt: Prompt, response: Response) -> tuple[Score, list[str]]:
        positional, keywords, is_batch = arguments(prompt, response)
        result = call(function, *positional, **keywords)
        return read_result(path, _take_only(path, result) if is_batch else result)

    return score


Arguments = Callable[[Prompt, Response], tuple[tuple[Any, ...], dict[str, Any], bool]]
"""(positional, by name, whether all are lists of one)"""


def _find_arguments(path: str, function: Callable[..., Any]) -> Arguments:
    try:
        parameters: Parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # Some builtins have none.
        return lambda prompt, response: ((prompt, response), {}, False)
    if "completions" in parameters:
        _check_names(path, parameters)
        return lambda prompt, response: ((), _build_trl(path, parameters, prompt, response), True)
    if "solution_str" in parameters:
        unknown = [name for name in _list_required(parameters) if name not in _VERL]
        if unknown:
            raise ValueError(_refuse(path, parameters, f"; verl gives no {', '.join(unknown)}"))
        return lambda prompt, response: ((), _choose(parameters, _build_verl(prompt, response)), False)
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        raise ValueError(_refuse(path, parameters)) from None
    return lambda prompt, response: ((prompt, response), {}, False)


def _build_trl(path: str, parameters: Parameters, prompt: Prompt, response: Response) -> dict[str, Any]:
    """TRL's keywords, each a list of one: the columns of the data, prompts and completions as chats where the data's
    are. Raises ValueError for a column that the data do not have."""
    is_chat = any(map(_is_chat, prompt.columns.values()))
    chat = [vars(message) for message in prompt.messages]
    columns = {"answer": prompt.answer, **list_columns(prompt)}
    given = {
        **{name: [value] for name, value in columns.items() if name not in ("prompt", "completion")},
        "prompts": [chat if is_chat else prompt.messages[-1].content if prompt.messages else prompt.text],
        "completions": [[{"role": "assistant", "content": response.text}] if is_chat else response.text],
        "completion_ids": [response.token_ids.tolist()],
    }
    missing = [name for name in _list_required(parameters) if name not in given]
    if missing:
        raise ValueError(
            f"reward.path={path} asks for {', '.join(missing)}; the columns of the data are"
            f" {', '.join(sorted(set(given) - set(_TRL_ONLY)))}"
        )
    return _choose(parameters, given)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and "content" in value[0]


def _build_verl(prompt: Prompt, response: Response) -> dict[str, Any]:
    """verl's keywords: columns of the data with verl's names where there are such, else what stands for them."""
    columns = list_columns(prompt)
    stated = columns.get("reward_model")
    truth = columns.get("ground_truth", prompt.answer)
    extra = columns.get("extra_info")
    return {
        "data_source": columns.get("data_source", ""),
        "solution_str": response.text,
        "ground_truth": stated.get("ground_truth", truth) if isinstance(stated, Mapping) else truth,
        "extra_info": extra if isinstance(extra, Mapping) else columns,
    }


def list_columns(prompt: Prompt) -> dict[str, Any]:
    """The record as the data have it; of generated problems, what they have besides question and answer."""
    return dict(prompt.columns or prompt.metadata)


def _choose(parameters: Parameters, given: dict[str, Any]) -> dict[str, Any]:
    """Those that the function takes."""
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return given if takes_all else {name: value for name, value in given.items() if name in parameters}


def _check_names(path: str, parameters: Parameters) -> None:
    """Raises ValueError where a parameter cannot be given by its name."""
    if any(each.kind is inspect.Parameter.POSITIONAL_ONLY for each in parameters.values()):
        raise ValueError(_refuse(path, parameters, "; TRL gives them by name"))


def _list_required(parameters: Parameters) -> list[str]:
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [
        name
        for name, each in parameters.items()
        if each.default is inspect.Parameter.empty and each.kind not in variable
    ]


def _refuse(path: str, parameters: Parameters, why: str = "") -> str:
    return f"{path} takes ({', '.join(map(str, parameters.values()))}){why}; accepted are {ACCEPTED}"


def _take_only(path: str, results: Any) -> Any:
    """The one result of TRL's list."""
    if not isinstance(results, list | tuple) or len(results) != 1:
        raise TypeError(
            f"reward.path={path} returned {_show(results)} for one completion; TRL's functions return a list with as"
            " many numbers as there are completions"
        )
    return results[0]


def read_result(path: str, result: Any) -> tuple[Score, list[str]]:
    """The Score that a function's result means, and the names of a dict's texts, which are not in it. Raises TypeError
    for what is none.
    """
    if isinstance(result, Score):
        return result, []
    if isinstance(result, Mapping):
        return _read_dict(path, result)
    number = _read_number(result)
    if number is None:
        raise TypeError(f"reward.path={path} returned {_show(result)}; it must return {RESULTS}")
    return Score(number, _is_correct(result, number)), []


def _read_dict(path: str, result: Mapping[Any, Any]) -> tuple[Score, list[str]]:
    """ "score", "correct" or verl's "acc", and every other number as a detail; texts and None are left out."""
    name = next((name for name in _SCORE_KEYS if name in result), None)
    number = None if name is None else _read_number(result[name])
    if number is None:
        raise TypeError(f"reward.path={path} returned {_show(dict(result))}; it must return {RESULTS}")
    details, left_out = {}, []
    for key, value in result.items():
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
    stated = next((_read_number(result[key]) for key in ("correct", "acc") if result.get(key) is not None), None)
    correct = _is_correct(result[name], number) if stated is None else stated >= CORRECT_AT
    return Score(number, correct, details), left_out


def _read_number(value: Any) -> float | None:
    """Also an array or tensor of one number; None for what is no number."""
    if not isinstance(value, Real) and getattr(value, "shape", None) in ((), (1,)):
        value = value.item()
    try:
        return float(value) if isinstance(value, Real | Decimal) else None
    except OverflowError:  # An integer of hundreds of digits.
        return math.inf if value > 0 else -math.inf


def _is_correct(result: Any, number: float) -> bool:
    return result if isinstance(result, bool) else number >= CORRECT_AT


def _show(value: Any, length: int = 60) -> str:
    text = repr(value)
    return f"{text if len(text) <= length else text[:length] + '...'} ({type(value).__name__})"
