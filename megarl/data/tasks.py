"""Sources that make their problems by rule."""

import itertools
import random

from megarl.config.data import AboutDataConfig, AdditionDataConfig
from megarl.config.errors import ConfigError
from megarl.data.problem import ProblemSplits, ask


class AboutSource:
    """`b...=` with answer `b12`: letters x numbers of dots, letters_per_dot letters asked for by each dot."""

    def __init__(self, config: AboutDataConfig):
        self.config = config

    def load(self, seed: int) -> ProblemSplits:
        """Every pair of a letter and a number of dots once, on one side. Raises ConfigError."""
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
        pairs = [(letter, dots) for letter in config.letters for dots in range(1, config.max_dots + 1)]
        num_heldout = len(pairs) // 4 if config.num_heldout is None else config.num_heldout
        _check_num_heldout(num_heldout, len(pairs), "pairs of a letter and a number of dots")
        random.Random(f"about/{seed}").shuffle(pairs)
        made = [ask(f"{letter}{'.' * dots}=", f"{letter}{dots * config.letters_per_dot}") for letter, dots in pairs]
        return ProblemSplits(made[num_heldout:], made[:num_heldout])


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


def _check_num_heldout(found: int, num_problems: int, what: str) -> None:
    if not 1 <= found < num_problems:
        raise ConfigError(
            [f"data.num_heldout: found {found}; of {num_problems} {what} it must be between 1 and {num_problems - 1}"]
        )
