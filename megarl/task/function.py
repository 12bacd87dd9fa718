"""The user's own reward function, called in processes of its own, and what else such processes run of megarl's."""

import ast
import base64
import inspect
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np

from megarl.config.errors import ConfigError, DescribedError, describe_error
from megarl.config.schema.task import FunctionRewardConfig
from megarl.files import check_state
from megarl.task.process import CallError, StartError, call, load_callable
from megarl.task.reward import ProcessReward
from megarl.task.sandbox import find_protections, python
from megarl.types import FinishReason, Message, Prompt, Response, RoutedExperts, Score, Turn, WeightVersions

RESERVED_NAMES = {"mean", "std", "min", "max", "correct", "positive_frac", "shaped_mean", "equal_groups_frac"}
RESERVED_NAMES |= {"failed_frac", "heldout"}
"""What the trainer itself logs under reward/."""


def serve_function(path: str, state: Any = None) -> Callable[..., dict[str, Any]]:
    """What the process calls: the user's function; without a question it gives the function's state.

    state: what the function is to go on from. Raises ValueError where it cannot be loaded or called, or keeps none.
    """
    target: Any = load_callable(path)
    function = adapt(path, target)
    keeps = hasattr(target, "state_dict") and hasattr(target, "load_state_dict")
    if state is not None:
        if not keeps:
            raise ValueError(f"the checkpoint has a state of {path}, which has no state_dict and load_state_dict now")
        target.load_state_dict(state)

    def score(question: str | None = None) -> dict[str, Any]:
        if question is None:
            return {"state": check_state(f"reward.path={path}", target.state_dict())} if keeps else {}
        prompt, response = decode_question(question)
        try:
            return encode_score(function(prompt, response))
        except MemoryError:
            raise
        except Exception as error:
            raise DescribedError(_explain(path, error, prompt)) from error

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
    """Calls the user's function; one that keeps a state in one process alone."""

    path = f"{serve_function.__module__}:{serve_function.__name__}"
    key = "reward.path"
    is_users = True

    def __init__(self, config: FunctionRewardConfig):
        super().__init__(config, path=config.path)
        self._keeps_state = False

    def _start(self) -> int:
        """Also finds out whether the function keeps a state."""
        count = super()._start()
        try:
            self._keeps_state = "state" in self._processes[0].call({})
        except CallError as error:
            raise ConfigError([f"{self.key}: {error}"]) from error
        if self._keeps_state and (number := self._config.num_workers or 1) > 1:
            why = "the reward has state_dict and load_state_dict, and each process would keep a state of its own"
            raise ConfigError([f"reward.num_workers: {number} found; {why}: must be 1 or null"])
        return 1 if self._keeps_state else count

    def state(self) -> Any:
        """Of a function that keeps one; where its process has ended by a failure, it goes on from the last one."""
        if self._keeps_state:
            try:
                self._options["state"] = self._processes[0].call({})["state"]
            except (CallError, StartError) as error:
                if isinstance(error, CallError) and error.kind == "raised":
                    raise ValueError(str(error)) from error
                text = f"{self.key}: the reward's state could not be read ({error}); a checkpoint has the last one"
                warnings.warn(f"{text} that could", RuntimeWarning, stacklevel=2)
        return self._options.get("state")

    def load_state(self, state: Any) -> None:
        """A process that has started goes on from this state by being started again."""
        self._options["state"] = state
        for process in self._processes:
            process.stop()

    def ask(self, prompt: Prompt, response: Response) -> dict[str, Any]:
        return {"question": encode_question(prompt, response)}

    def read(self, answer: Any, prompt: Prompt) -> Score:
        """Raises ValueError for RESERVED_NAMES in `details`."""
        if reserved := RESERVED_NAMES & answer["details"].keys():
            names = ", ".join(sorted(reserved))
            found = f"reward.path={self._options['path']}: found details {names}"
            raise ValueError(f"{found}; megarl's own metrics have these names under reward/")
        return Score(**answer)


ACCEPTED = (
    "(prompt, response), TRL's (prompts, completions, **columns)"
    " or verl's (data_source, solution_str, ground_truth, extra_info)"
)
RESULTS = 'a number, True or False, a dict with "score" (or "reward"), or a megarl.types.Score'
CORRECT_AT = 1.0
"""The least score that counts as correct, where the function says nothing about it"""


def adapt(path: str, function: Callable[..., Any]) -> Callable[[Prompt, Response], Score]:
    """The function as one from (prompt, response) to a Score; what it returns may be awaited.

    Raises ValueError for parameters of another sort; what comes out does for columns that the data do not have, and
    TypeError for another result.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Some builtins have none.
        signature = inspect.signature(lambda prompt, response, /: None)
    parameters = signature.parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    is_trl, is_verl = "completions" in parameters, "solution_str" in parameters

    def build(prompt: Prompt, response: Response) -> inspect.BoundArguments:
        if not is_trl and not is_verl:
            return signature.bind(prompt, response)
        given = _build_trl(prompt, response) if is_trl else _build_verl(prompt, response)
        return signature.bind(**{name: given[name] for name in given if takes_all or name in parameters})

    if not is_trl:
        try:
            build(Prompt("", "", (), ""), None)  # type: ignore[arg-type]
        except TypeError as error:
            found = ", ".join(map(str, parameters.values()))
            raise ValueError(f"{path} takes ({found}), {error}; accepted are {ACCEPTED}") from error

    def score(prompt: Prompt, response: Response) -> Score:
        try:
            bound = build(prompt, response)
        except TypeError as error:
            has = ", ".join(sorted({"answer", *list_columns(prompt)}))
            raise ValueError(f"reward.path={path}: {error}; the columns of the data are {has}") from error
        result = call(function, *bound.args, **bound.kwargs)
        if is_trl and (not isinstance(result, list | tuple) or len(result) != 1):
            needed = "TRL's functions return a list with as many numbers as there are completions"
            raise TypeError(f"reward.path={path} returned {_show(result)} for one completion; {needed}")
        return read_result(path, result[0] if is_trl else result)

    return score


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
    return {
        "data_source": columns.get("data_source", ""),
        "solution_str": response and response.text,
        "ground_truth": stated.get("ground_truth", truth) if isinstance(stated, Mapping) else truth,
        "extra_info": extra if isinstance(extra, Mapping) else columns,
    }


def list_columns(prompt: Prompt) -> dict[str, Any]:
    """The record as the data have it; a generated problem's metadata."""
    return dict(prompt.columns or prompt.metadata)


def read_result(path: str, result: Any) -> Score:
    """The Score that a function's result means. Of a dict: "score" or "reward", "correct" or verl's "acc", and every
    other number as a detail; texts and None are left out. Raises TypeError for what is no result."""
    if isinstance(result, Score):
        return result
    entries = dict(result) if isinstance(result, Mapping) else {"score": result}
    numbers = {str(key): _read_number(value) for key, value in entries.items()}
    name = "reward" if "reward" in entries and "score" not in entries else "score"
    reward = numbers.get(name)
    if reward is None:
        raise TypeError(f"reward.path={path} returned {_show(result)}; it must return {RESULTS}")
    for key, value in entries.items():
        is_left_out = value is None or (isinstance(value, str) and key != "acc")
        if key == "correct" and value is not None and numbers[key] not in (0.0, 1.0):
            raise TypeError(f"reward.path={path} returned 'correct': {_show(value)}; it must be True or False")
        if numbers[str(key)] is None and not is_left_out:
            logged = f"beside {name!r} there may be numbers, which are logged as means, and texts, which are not"
            raise TypeError(f"reward.path={path} returned {key!r}: {_show(value)}; {logged}")
    stated = next((numbers[key] for key in ("correct", "acc") if numbers.get(key) is not None), None)
    given = entries[name] if isinstance(entries[name], bool) else reward >= CORRECT_AT
    details = {key: value for key, value in numbers.items() if value is not None and key not in (name, "correct")}
    return Score(reward, given if stated is None else stated >= CORRECT_AT, details)


def _read_number(value: Any) -> float | None:
    """Also an array or tensor of one number; None for what is no number."""
    if not isinstance(value, Real) and getattr(value, "shape", None) in ((), (1,)):
        value = value.item()
    try:
        return float(value) if isinstance(value, Real | Decimal) else None
    except OverflowError:  # An integer of hundreds of digits.
        return math.inf if value > 0 else -math.inf


def _show(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:60] + '...'} ({type(value).__name__})"


def encode_question(prompt: Prompt, response: Response) -> str:
    """All that a prompt and a response have, as JSON; of the prompt's columns what JSON has no type for is a text."""

    def encode(value: Any) -> Any:
        match value:
            case np.ndarray():
                return value.tolist()
            case bytes():
                return base64.b64encode(value).decode()
            case FinishReason():
                return value.value
            case Mapping():
                return dict(value)
        return vars(value) if is_dataclass(value) else str(value)

    return json.dumps([prompt, response], default=encode)


def decode_question(text: str) -> tuple[Prompt, Response]:
    """The prompt and the response that `encode_question` was given."""
    prompt, response = json.loads(text)
    experts, versions = response["routed_experts"], response["weight_versions"]
    prompt |= {"token_ids": tuple(prompt["token_ids"]), "messages": tuple(Message(**m) for m in prompt["messages"])}
    response |= {
        "weight_versions": WeightVersions(**{name: tuple(values) for name, values in versions.items()}),
        "finish_reason": FinishReason(response["finish_reason"]),
        "routed_experts": experts and RoutedExperts(**{**experts, "data": base64.b64decode(experts["data"])}),
        "turns": tuple(Turn(**turn) for turn in response["turns"]),
    }
    return Prompt(**prompt), Response(**response)


def encode_score(score: Score) -> dict[str, Any]:
    """All that a score has, as JSON. Raises TypeError and ValueError for what is not a number."""
    # The text "False" is true to Python, and so is NaN.
    if isinstance(score.correct, str) or score.correct not in (0, 1):
        raise TypeError(f"a Score has the correct {score.correct!r}; it must be True or False")
    details = {str(name): float(value) for name, value in score.details.items()}
    return vars(score) | {"reward": float(score.reward), "correct": bool(score.correct), "details": details}


TEXT_TAKERS = frozenset({"Float", "Function", "Integer", "Rational", "Symbol"})
"""The only calls that may hold a string: sympy's own way of writing a name or a number."""
FUNCTIONS = TEXT_TAKERS | {
    *("Abs", "Add", "Mul", "Pow", "Max", "Min", "Eq", "Ne", "Lt", "Le", "Gt", "Ge", "Not", "And", "Or", "sin", "cos"),
    *("tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth", "asin", "acos", "atan", "acot", "atan2", "asinh"),
    *("acosh", "atanh", "exp", "ln", "log", "sqrt", "cbrt", "root", "factorial", "binomial", "gamma", "erf"),
    *("ceiling", "floor", "sign", "re", "im", "conjugate"),
}
NODES: tuple[type[ast.AST], ...] = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.operator, ast.unaryop, ast.cmpop),
    *(ast.Constant, ast.Name, ast.Tuple, ast.List, ast.keyword, ast.expr_context),
)
"""What may stand in the source besides calls."""


def guard_sympy() -> None:
    """Make sympy, which turns text into Python source and evaluates it, refuse all but arithmetic, names and common
    functions with ValueError."""
    from sympy.parsing import sympy_parser

    stringify = sympy_parser.stringify_expr

    def guarded_stringify(*args: Any, **kwargs: Any) -> str:
        source: str = stringify(*args, **kwargs)
        check_source(source)
        return source

    sympy_parser.stringify_expr = guarded_stringify


def check_source(source: str) -> None:
    """Raises ValueError unless the source is nothing but operators, numbers, names and calls of FUNCTIONS."""
    try:
        tree = ast.parse(source.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"not an expression: {error}") from error
    texts: set[int] = set()
    for node in ast.walk(tree):  # Parents come before their children.
        if isinstance(node, ast.Call):
            if not _is_allowed(node.func):
                raise ValueError(f"{ast.unparse(node.func)} is not a function that an answer may use")
            if isinstance(node.func, ast.Name) and node.func.id in TEXT_TAKERS:
                texts.update(map(id, node.args))
        elif not isinstance(node, NODES):
            raise ValueError(f"{type(node).__name__} is not part of an answer")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in texts:
            raise ValueError("text is not part of an answer")


def _is_allowed(function: ast.expr) -> bool:
    """Whether f(...) may be called; Function('f')(...) is how sympy writes a function it does not know."""
    if isinstance(function, ast.Call):
        return isinstance(function.func, ast.Name) and function.func.id == "Function"
    return isinstance(function, ast.Name) and function.id in FUNCTIONS


Scorer = Callable[..., dict[str, Any]]


def build_math_scorer() -> Scorer:
    """(gold, text, mode, prompt) -> {"correct", "read", "answer"}; see megarl.task.math_grading."""
    from megarl.task.math_grading import ends_in_open_thinking, grade

    guard_sympy()

    def score(gold: str, text: str, mode: str, prompt: str) -> dict[str, Any]:
        verdict = grade(gold, text, mode, thinking=ends_in_open_thinking(prompt))
        return {"correct": verdict.is_right, "read": verdict.is_read, "answer": verdict.answer}

    return score


def build_pattern_matcher(pattern: str) -> Callable[..., bool]:
    """(text) -> whether the text but for white space at its ends matches the pattern."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda text: compiled.fullmatch(text.strip()) is not None


def load_tools(paths: Mapping[str, str], result_length: int) -> Callable[..., str]:
    """The function (name, arguments) -> result as text, of the tools at `paths`, package.module:function by name.

    A result that is no text is given as JSON; results are cut to `result_length` characters.
    """
    functions = {name: load_callable(path) for name, path in paths.items()}
    if functions.get("python") is python:
        find_protections()  # Tries what the machine has, which takes a second: no call's time.

    def run(name: str, arguments: dict[str, Any]) -> str:
        result = call(functions[name], **arguments)
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        more = len(text) - result_length
        return text if more <= 0 else f"{text[:result_length]}\n... ({more} more characters)"

    return run
