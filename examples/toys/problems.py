"""Problems that are made by a rule, each set by a function for data=function: (seed, num_heldout, **data.options)."""

import itertools
import random

from megarl.config.errors import ConfigError
from megarl.task.data import Problem, ProblemSplits, ask
from megarl.types import Message

PLACEHOLDER = "{question}"
EXAMPLES = ((123, 456), (705, 318), (59, 64), (8, 2071))
MOST = 100_000
"""Of what each is a prompt or a part of one, all of which are made at the start"""


def letter_count(
    seed: int, num_heldout: int | None, letters: str = "abcdef", max_dots: int = 16, letters_per_dot: int = 4
) -> ProblemSplits:
    """`b...=` with answer `b12`: letters x numbers of dots, letters_per_dot letters asked for by each dot.

    Every pair of a letter and a number of dots once, on one side; see `draw_pairs`. Raises ConfigError.
    """
    problems = []
    if not letters or len(set(letters)) != len(letters):
        problems.append(f"data.options.letters: found {letters!r}; it must be one or more different letters")
    elif not letters.isalpha():
        problems.append(f"data.options.letters: found {letters!r}; it must be letters only")
    for key, found in (("max_dots", max_dots), ("letters_per_dot", letters_per_dot)):
        if not 1 <= found <= MOST:
            problems.append(f"data.options.{key}: found {found}; it must be 1 or more and at most {MOST}")
    if problems:
        raise ConfigError(problems)
    num_pairs = len(letters) * max_dots
    num_heldout = num_pairs // 4 if num_heldout is None else num_heldout
    _check_num_heldout(num_heldout, num_pairs, "pairs of a letter and a number of dots")
    # The task's first name: with another seed text the same seed would draw other prompts than in recorded runs.
    generator = random.Random(f"about/{seed}")
    heldout = draw_pairs(letters, max_dots, num_heldout, generator)
    chosen = set(heldout)
    pairs = [(letter, dots) for letter in letters for dots in range(1, max_dots + 1)]
    train = [pair for pair in pairs if pair not in chosen]
    generator.shuffle(train)

    def ask_all(pairs: list[tuple[str, int]]) -> list[Problem]:
        return [ask(f"{letter}{'.' * dots}=", f"{letter}{dots * letters_per_dot}") for letter, dots in pairs]

    return ProblemSplits(ask_all(train), ask_all(heldout))


def draw_pairs(letters: str, max_dots: int, number: int, generator: random.Random) -> list[tuple[str, int]]:
    """`number` (letters * max_dots at most) different pairs of a letter and 1 to max_dots dots, in random order.

    Stratified: letters get equally many (within one), and each letter one number of dots from each of equal
    ranges. A plain draw may favour a letter, and answering with that letter alone would then score too well.
    """
    each, rest = divmod(number, len(letters))
    favoured = set(generator.sample(letters, rest))
    pairs = []
    for letter in letters:
        count = each + (letter in favoured)
        edges = [1 + i * max_dots // count for i in range(count + 1)] if count else [1]
        pairs += [(letter, generator.randrange(low, high)) for low, high in itertools.pairwise(edges)]
    generator.shuffle(pairs)
    return pairs


def addition(seed: int, num_heldout: int | None, num_train: int = 4096, answer_length: int = 12) -> ProblemSplits:
    """`47 + 38` with answer `85`; a held-out sum is not in training, nor is it with its numbers swapped.

    `num_train` and `num_heldout` (500) different sums. answer_length: tokens that an answer takes at most, which
    conf/model/smollm2_135m.yaml reads. Raises ConfigError.
    """
    pairs = list(itertools.combinations_with_replacement(range(10, 100), 2))
    num_heldout = 500 if num_heldout is None else num_heldout
    _check_num_heldout(num_heldout, len(pairs), "different pairs of two-digit numbers")
    generator = random.Random(f"addition/{seed}")
    generator.shuffle(pairs)
    heldout = [pair if generator.random() < 0.5 else pair[::-1] for pair in pairs[:num_heldout]]
    train = [ordered for a, b in pairs[num_heldout:] for ordered in dict.fromkeys(((a, b), (b, a)))]
    if not 1 <= num_train <= len(train):
        raise ConfigError(
            [
                f"data.options.num_train: found {num_train}; it must be between 1 and {len(train)},"
                f" the sums left beside {num_heldout} held-out ones"
            ]
        )
    generator.shuffle(train)
    return ProblemSplits(
        [ask(f"{a} + {b}", str(a + b)) for a, b in train[:num_train]],
        [ask(f"{a} + {b}", str(a + b)) for a, b in heldout],
    )


def guess(seed: int, num_heldout: int | None, max_number: int = 7) -> ProblemSplits:
    """`1-7` with the answer 1, 2, ... or 7: the range, and the number that environment=guess hides in it.

    Each number once, on both sides: the question does not tell it. Raises ConfigError.
    """
    if not 2 <= max_number <= 10**6:
        raise ConfigError([f"data.options.max_number: found {max_number}; it must be 2 or more and at most 1000000"])
    problems = [ask(f"1-{max_number}", str(number)) for number in range(1, max_number + 1)]
    return ProblemSplits(problems, problems, shares_questions=True)


def calculator(
    seed: int,
    num_heldout: int | None,
    num_train: int = 4096,
    digits: int = 3,
    num_examples: int = 1,
    example_call: str = '[calculator(expression="{question}")]',
) -> ProblemSplits:
    """`347 * 892` with answer `309524`, after num_examples worked examples; a held-out product is not in training.

    `num_train` and `num_heldout` (256) different products. example_call: the call in an example, {question} replaced;
    in the format that environment.parser reads. Raises ConfigError.
    """
    num_heldout = 256 if num_heldout is None else num_heldout
    low, high = 10 ** (digits - 1), 10**digits
    most = (high - low) * (high - low + 1) // 2
    problems = []
    if not 0 <= num_examples <= len(EXAMPLES):
        problems.append(f"data.options.num_examples: found {num_examples}; it must be between 0 and {len(EXAMPLES)}")
    if PLACEHOLDER not in example_call:
        problems.append(f"data.options.example_call: found {example_call!r}; it must contain {PLACEHOLDER}")
    if num_heldout < 1:
        problems.append(f"data.num_heldout: found {num_heldout}; it must be 1 or more")
    if not 1 <= num_train <= most // 2 - num_heldout:
        problems.append(
            f"data.options.num_train: found {num_train}; it must be between 1 and {most // 2 - num_heldout}, half of"
            f" the products of two numbers of {digits} digits without the {num_heldout} held-out ones"
        )
    if problems:
        raise ConfigError(problems)
    examples: list[Message] = []
    for left, right in EXAMPLES[:num_examples]:
        question, answer = f"{left} * {right}", str(left * right)
        call = example_call.replace(PLACEHOLDER, question)
        examples += [Message("user", question), Message("assistant", call)]
        examples += [Message("user", answer), Message("assistant", answer)]
    generator = random.Random(f"calculator/{seed}")
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < num_train + num_heldout:
        a, b = generator.randrange(low, high), generator.randrange(low, high)
        if (b, a) not in pairs:
            pairs[a, b] = None
    found = [Problem((*examples, Message("user", f"{a} * {b}")), str(a * b)) for a, b in pairs]
    return ProblemSplits(found[num_heldout:], found[:num_heldout])


def _check_num_heldout(found: int, num_problems: int, what: str) -> None:
    if not 1 <= found < num_problems:
        raise ConfigError(
            [f"data.num_heldout: found {found}; of {num_problems} {what} it must be between 1 and {num_problems - 1}"]
        )
