"""Sources that generate their problems by a rule."""

import itertools
import random

from megarl.config.errors import ConfigError
from megarl.config.schema.data import AdditionDataConfig, CalculatorDataConfig, GuessDataConfig, LetterCountDataConfig
from megarl.task.problems import Problem, ProblemSplits, ask
from megarl.types import Message

PLACEHOLDER = "{question}"


class LetterCountSource:
    """`b...=` with answer `b12`: letters x numbers of dots, letters_per_dot letters asked for by each dot."""

    def __init__(self, config: LetterCountDataConfig):
        self.config = config

    def load(self, seed: int) -> ProblemSplits:
        """Every pair of a letter and a number of dots once, on one side; see `draw_pairs`. Raises ConfigError."""
        config = self.config
        problems = []
        if not config.letters or len(set(config.letters)) != len(config.letters):
            problems.append(f"data.letters: found {config.letters!r}; it must be one or more different letters")
        elif not config.letters.isalpha():
            problems.append(f"data.letters: found {config.letters!r}; it must be letters only")
        for key in ("max_dots", "letters_per_dot"):
            if getattr(config, key) < 1:
                problems.append(f"data.{key}: found {getattr(config, key)}; it must be 1 or more")
        if problems:
            raise ConfigError(problems)
        num_pairs = len(config.letters) * config.max_dots
        num_heldout = num_pairs // 4 if config.num_heldout is None else config.num_heldout
        _check_num_heldout(num_heldout, num_pairs, "pairs of a letter and a number of dots")
        # The task's first name: with another seed text the same seed would draw other prompts than in recorded runs.
        generator = random.Random(f"about/{seed}")
        heldout = draw_pairs(config.letters, config.max_dots, num_heldout, generator)
        chosen = set(heldout)
        pairs = [(letter, dots) for letter in config.letters for dots in range(1, config.max_dots + 1)]
        train = [pair for pair in pairs if pair not in chosen]
        generator.shuffle(train)
        return ProblemSplits([self._ask(*pair) for pair in train], [self._ask(*pair) for pair in heldout])

    def _ask(self, letter: str, dots: int) -> Problem:
        return ask(f"{letter}{'.' * dots}=", f"{letter}{dots * self.config.letters_per_dot}")


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


class AdditionSource:
    """`47 + 38` with answer `85`; a held-out sum is not in training, nor is it with its numbers swapped."""

    def __init__(self, config: AdditionDataConfig):
        self.config = config

    def load(self, seed: int) -> ProblemSplits:
        """`num_train` and `num_heldout` different sums. Raises ConfigError."""
        pairs = list(itertools.combinations_with_replacement(range(10, 100), 2))
        num_heldout = 500 if self.config.num_heldout is None else self.config.num_heldout
        _check_num_heldout(num_heldout, len(pairs), "different pairs of two-digit numbers")
        generator = random.Random(f"addition/{seed}")
        generator.shuffle(pairs)
        heldout = [pair if generator.random() < 0.5 else pair[::-1] for pair in pairs[:num_heldout]]
        train = [ordered for a, b in pairs[num_heldout:] for ordered in dict.fromkeys(((a, b), (b, a)))]
        if not 1 <= self.config.num_train <= len(train):
            raise ConfigError(
                [
                    f"data.num_train: found {self.config.num_train}; it must be between 1 and {len(train)},"
                    f" the sums left beside {num_heldout} held-out ones"
                ]
            )
        generator.shuffle(train)
        train = train[: self.config.num_train]
        return ProblemSplits(
            [ask(f"{a} + {b}", str(a + b)) for a, b in train],
            [ask(f"{a} + {b}", str(a + b)) for a, b in heldout],
        )


class GuessSource:
    """`1-7` with the answer 1, 2, ... or 7: the range, and the number that environment=guess hides in it."""

    def __init__(self, config: GuessDataConfig):
        self.config = config

    def load(self, seed: int) -> ProblemSplits:
        """Each number once, on both sides: the question does not tell it. Raises ConfigError."""
        last = self.config.max_number
        if last < 2:
            raise ConfigError([f"data.max_number: found {last}; it must be 2 or more"])
        problems = [ask(f"1-{last}", str(number)) for number in range(1, last + 1)]
        return ProblemSplits(problems, problems, shares_questions=True)


class CalculatorSource:
    """`347 * 892` with answer `309524`, after worked examples; a held-out product is not in training."""

    EXAMPLES = ((123, 456), (705, 318), (59, 64), (8, 2071))

    def __init__(self, config: CalculatorDataConfig):
        self.config = config

    def load(self, seed: int) -> ProblemSplits:
        """`num_train` and `num_heldout` different products. Raises ConfigError."""
        config = self.config
        num_heldout = 256 if config.num_heldout is None else config.num_heldout
        low, high = 10 ** (config.digits - 1), 10**config.digits
        most = (high - low) * (high - low + 1) // 2
        problems = []
        if not 0 <= config.num_examples <= len(self.EXAMPLES):
            problems.append(
                f"data.num_examples: found {config.num_examples}; it must be between 0 and {len(self.EXAMPLES)}"
            )
        if PLACEHOLDER not in config.example_call:
            problems.append(f"data.example_call: found {config.example_call!r}; it must contain {PLACEHOLDER}")
        if num_heldout < 1:
            problems.append(f"data.num_heldout: found {num_heldout}; it must be 1 or more")
        if not 1 <= config.num_train <= most // 2 - num_heldout:
            problems.append(
                f"data.num_train: found {config.num_train}; it must be between 1 and {most // 2 - num_heldout}, half of"
                f" the products of two numbers of {config.digits} digits without the {num_heldout} held-out ones"
            )
        if problems:
            raise ConfigError(problems)
        generator = random.Random(f"calculator/{seed}")
        pairs: dict[tuple[int, int], None] = {}
        while len(pairs) < config.num_train + num_heldout:
            a, b = generator.randrange(low, high), generator.randrange(low, high)
            if (b, a) not in pairs:
                pairs[a, b] = None
        found = [self._ask(a, b) for a, b in pairs]
        return ProblemSplits(found[num_heldout:], found[:num_heldout])

    def _ask(self, a: int, b: int) -> Problem:
        messages = []
        for left, right in self.EXAMPLES[: self.config.num_examples]:
            question, answer = f"{left} * {right}", str(left * right)
            call = self.config.example_call.replace(PLACEHOLDER, question)
            messages += [Message("user", question), Message("assistant", call)]
            messages += [Message("user", answer), Message("assistant", answer)]
        return Problem((*messages, Message("user", f"{a} * {b}")), str(a * b))


def _check_num_heldout(found: int, num_problems: int, what: str) -> None:
    if not 1 <= found < num_problems:
        raise ConfigError(
            [f"data.num_heldout: found {found}; of {num_problems} {what} it must be between 1 and {num_problems - 1}"]
        )
