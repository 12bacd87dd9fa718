"""Data that are made, reasoning-gym's and the toys'; examples/toys: guesses and the best scores of policies that ignore
or read the answers; the calculator.
"""

import json
import operator
import re
from dataclasses import replace
from pathlib import Path

import pytest
from data_cases import build_byte_tokenizer, build_char_tokenizer, load_toy
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.errors import ConfigError
from megarl.config.schema.task import DataConfig, FunctionDataConfig, ReasoningGymDataConfig
from megarl.environment import Action, EpisodeSetting, Step
from megarl.examples.toys.calculator import calculator, evaluate
from megarl.examples.toys.guess import Guess
from megarl.task.data import DataSplits, build_data, load_made
from megarl.types import FinishReason, Prompt


def build_small(config: DataConfig, seed: int = 1) -> DataSplits:
    return build_data(config, build_byte_tokenizer(), seed)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (load_toy("letter_count", letters="aa"), "data.options.letters"),
        (load_toy("letter_count", letters="a1"), "data.options.letters"),
        (load_toy("letter_count", max_dots=0), "data.options.max_dots: found 0; it must be 1 or more"),
        (load_toy("letter_count", letter="x"), "data.options.letter: no such parameter of .*; did you mean letters?"),
        (load_toy("letter_count", 96), "data.num_heldout: found 96; of 96 .* between 1 and 95"),
        (load_toy("addition", num_train=7200), "data.options.num_train: found 7200; .* between 1 and 71"),
        (replace(load_toy("addition"), instruction="Add."), r"data.instruction: found 'Add.'; .*\{question\}"),
        (load_toy("guess", max_number=1), "data.options.max_number: found 1; it must be 2 or more"),
        (load_toy("calculator", num_examples=5), "data.options.num_examples: found 5"),
        (load_toy("calculator", example_call="call"), "data.options.example_call: found 'call'"),
        (load_toy("calculator", digits=1), "data.options.num_train: found 4096"),
        (load_toy("calculator", 0), "data.num_heldout: found 0"),
        *[
            (ReasoningGymDataConfig(**{"num_heldout": 2, "size": 2, **keys}), expected)
            for keys, expected in [
                ({"task": "chainsum"}, "data.task=chainsum: no such task of reasoning-gym; did you mean chain_sum?"),
                ({"options": {"max_term": 3}}, "data.options.max_term: .*did you mean max_terms?"),
                ({"options": {"seed": 3}}, "data.options.seed: no such option"),
                ({"options": {"max_terms": -1}}, "data.options: chain_sum refuses"),
                ({"task": "arc_agi"}, "data.task: arc_agi cannot be scored"),
                ({"size": 0}, "data.size: found 0"),
                ({"options": {"max_terms": 2, "max_digits": 1}, "size": 900}, "data.size: found 900; .*gave only"),
            ]
        ],
        (FunctionDataConfig(path="mine.py"), "data.path: found 'mine.py'; it must be FILE.py:NAME"),
        (FunctionDataConfig(path="math:pi"), "data.path: found 'math:pi', a float; a callable was expected"),
        (FunctionDataConfig(path="os:listdir"), "data.path: os:listdir raised TypeError"),
        (DataConfig(), "DataConfig is not a source"),
    ],
)
def test_a_bad_value_is_named_with_what_would_be_right(config: DataConfig, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        build_small(config)


def test_the_toys_hold_every_problem_once_and_no_heldout_sum_is_in_training_with_its_numbers_swapped() -> None:
    data = build_data(load_toy("letter_count"), build_char_tokenizer(), seed=1)
    prompts = (*data.train, *data.heldout)
    assert sorted(p.answer for p in prompts) == sorted(f"{c}{n}" for c in "abcdef" for n in range(4, 65, 4))
    assert (len(data.train), len(data.heldout), data.num_dropped) == (72, 24, 0)
    assert all(p.text == f"{p.answer[0]}{'.' * (int(p.answer[1:]) // 4)}=" for p in prompts)
    data = build_small(load_toy("addition"))
    train, heldout = (
        {tuple(map(int, re.findall(r"\d+", p.text)[:2])): p.answer for p in side} for side in (data.train, data.heldout)
    )
    assert not {frozenset(pair) for pair in train} & {frozenset(pair) for pair in heldout}
    assert (len(train), len({frozenset(pair) for pair in heldout})) == (4096, 500)
    assert all(str(sum(pair)) == answer for pair, answer in (train | heldout).items())
    assert {len(str(number)) for pair in train | heldout for number in pair} == {2}


@pytest.mark.parametrize(
    "config",
    [load_toy("letter_count"), load_toy("addition", num_train=50), ReasoningGymDataConfig(size=20, num_heldout=10)],
)
def test_the_same_seed_gives_the_same_data_and_another_seed_another_split(config: DataConfig) -> None:
    first, again, other = build_small(config), build_small(config), build_small(config, seed=2)
    assert first == again
    assert {p.id for p in first.heldout} != {p.id for p in other.heldout}
    shared = {p.text: p.id for p in first.train}
    assert all(shared.get(p.text, p.id) == p.id for p in (*other.train, *other.heldout))
    assert len({p.id for p in (*first.train, *first.heldout)}) == len(first.train) + len(first.heldout)


def test_reasoning_gym_scores_its_own_answers_from_the_stored_problem() -> None:
    from reasoning_gym import get_score_answer_fn

    data = build_small(ReasoningGymDataConfig(task="chain_sum", size=30, num_heldout=10, options={"max_terms": 3}))
    assert (len(data.train), len(data.heldout)) == (30, 10)
    assert not {p.text for p in data.train} & {p.text for p in data.heldout}
    for prompt in (*data.train, *data.heldout):
        stored = json.loads(prompt.metadata["reasoning_gym"])
        entry, score = stored["entry"], get_score_answer_fn(stored["task"])
        assert (stored["task"], stored["config"]) == ("chain_sum", {"max_terms": 3})
        assert entry["question"] in prompt.text
        assert score(prompt.answer, entry) == 1.0 > score(prompt.answer + "1", entry)
        assert entry["metadata"]["num_terms"] <= 3


MINE = """
def both(seed, num_heldout, low=0):
    records = [{"question": f"double {n + seed}", "answer": 2 * (n + seed), "level": "easy"} for n in range(low, 9)]
    return records[num_heldout:], records[:num_heldout]

def one(seed, num_heldout, **options): return both(seed, 2, **options)[0]
def wrong(seed, num_heldout): return ["double 3"]
def none(seed, num_heldout): return []
"""


def test_a_function_of_the_user_makes_records_as_a_file_has_them(tmp_path: Path) -> None:
    """With a held-out part of its own, or without one, or none at all."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    config = FunctionDataConfig(path=f"{file}:both", num_heldout=3, options={"low": 1})
    found = load_made(config, 7)
    assert [problem.answer for problem in found.heldout or ()] == ["16", "18", "20"]
    assert (len(found.train), found.train[0].metadata["level"]) == (5, "easy")
    assert len(build_small(replace(config, path=f"{file}:one")).heldout) == 3
    for name, message in (("wrong", "found 'double 3'; expected a dict"), ("none", "made no training problems")):
        with pytest.raises(ConfigError, match=message):
            build_small(FunctionDataConfig(path=f"{file}:{name}"))


def begin(number: int | str, max_turns: int = 3) -> Guess:
    environment = Guess(max_turns, ">", "<")
    environment.reset(EpisodeSetting(Prompt("p", "1-7", (1,), str(number)), seed=1))
    return environment


@pytest.mark.parametrize(
    ("guesses", "steps"),
    [
        # Answered with higher or lower until it is right,
        (("4", "6", "1 to 7? I guess 005."), [(">", 0, 0), ("<", 0, 0), (None, 0, 0)]),
        # ended by an action without a number; a guess that an earlier answer ruled out is counted.
        *[((text,), [(None, 0, 1)]) for text in ("<>", "", "four", "٥")],
        *[(("4", text), [(">", 0, 0), (">", 1, 0)]) for text in ("3", "4", "0")],
        (("1", "47"), [(">", 0, 0), ("<", 0, 0)]),
        (("1", "9" * 100_000), [(">", 0, 0), ("<", 0, 0)]),
    ],
)
def test_a_guess_is_answered(guesses, steps):
    environment = begin(5)
    for turn, (text, (observation, ruled_out, unreadable)) in enumerate(zip(guesses, steps, strict=True)):
        details = {"ruled_out": ruled_out, "unreadable": unreadable}
        step = environment.step(Action(text, text, (1,), turn, FinishReason.stop))
        end = Step(reward=float("005" in text), done=True, details=details)
        assert step == (end if observation is None else Step(observation, details=details))
    for answer in ("b12", "", "-1", "3.5", "1" * 19):
        with pytest.raises(ValueError, match=r"prompt 'p': answer .* needs a whole number"):
            begin(answer)


OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("347 * 892", "309524"), (" (12 + 3) * -4 ", "-60"), ("7 / 2", "3.5"), ("6 / 2", "3"), ("7 // 2 + 7 % 4", "6"),
        ("2 ** 10", "1024"), ("2 ^ 10 + 1", "1025"), ("6 × 7 ÷ 2 − 1", "20"), ("0.1 + 0.2", "0.3"),
        ("sqrt(16) + max(1, 2, 3)", "7"), ("round(2.567, 2)", "2.57"), ("cos(pi)", "-1"), ("factorial(5)", "120"),
        ("1e20 * 1.0", "1e+20"), ("2 ** 200", str(2**200)),
    ],
)  # fmt: skip
def test_the_calculator_calculates(expression: str, expected: str) -> None:
    assert calculator(expression) == expected


@given(
    st.integers(-999, 999),
    st.lists(st.tuples(st.sampled_from(sorted(OPERATORS)), st.integers(0, 999)), min_size=1, max_size=4),
)
def test_parenthesized_chains_agree_with_pythons_integers(first: int, steps: list[tuple[str, int]]) -> None:
    expression, value = str(first), first
    for sign, number in steps:
        expression, value = f"({expression}) {sign} {number}", OPERATORS[sign](value, number)
    assert evaluate(expression) == value


REFUSED = {
    "not an arithmetic": ["", "12 *", "(" * 300 + "1" + ")" * 190],
    "without commas": ["1,234 * 2"],
    "cannot be calculated": [
        *("__import__('os').system('true')", "().__class__", "'a' * 3", "[1][0]", "lambda: 1", "x + 1", "True + 1"),
        *("1 if 2 else 3", "max(*[1, 2])", "round(2.5, ndigits=1)"),
    ],
    "sqrt": ["sqrt(1, 2)"],
    "complex": ["(-8) ** 0.5"],
    "math domain error": ["sqrt(-1)"],
    "500 at most": ["1 + " * 200 + "1"],
    "from 0 to 500": ["factorial(10**6)"],
    # Numbers that are too large end at once.
    "": ["9 ** 9 ** 9", "2 ** 5000", "factorial(500) ** 2", "1e308 * 10", "10.0 ** 400", "5 % 0"],
}


@pytest.mark.parametrize(("message", "expressions"), REFUSED.items())
def test_what_is_no_arithmetic_is_refused(message: str, expressions: list[str]) -> None:
    for expression in expressions:
        with pytest.raises(ValueError if message else ArithmeticError, match=message or None):
            evaluate(expression)
