"""One key of the configuration: its default, its range, and under which other choices it has an effect."""

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field
from math import inf, isfinite
from typing import Any


@dataclass(frozen=True)
class Effect:
    """When a key, and with it all below it, has an effect."""

    counts: Callable[[Any], bool]
    """of a `megarl.config.checks.Place`: the node of the key and the whole configuration"""
    reason: str
    """why the key has none, and what would make it count; {config}, {node} and {path} are those of the place"""
    sibling: str = ""
    """the name of another key of the node, whose value is {found} in `reason`"""


@dataclass(frozen=True)
class Key:
    """What a field says of itself besides its type and default."""

    low: float = -inf
    high: float = inf
    above: float = -inf
    """As `low`, and out of the range itself"""
    below: float = inf
    """As `high`, and out of the range itself"""
    why: str = ""
    """Where the bounds come from; empty where nobody would ask."""
    effects: tuple[Effect, ...] = ()
    despite: tuple[Effect, ...] = ()
    """Effects of the groups above that the key does without: it counts all the same."""
    strict: bool = False
    """Without effect, another value than the default is an error whoever set it, a preset too."""
    off: object = None
    """A value with which the key asks for nothing, besides null, a choice none, and 0 or false as the default."""
    is_prose: bool = False
    """A text that may be empty and have lines."""
    names_folder: bool = False
    """A text that is a part of the run's folder."""

    def contains(self, number: float) -> bool:
        return isfinite(number) and self.low <= number <= self.high and self.above < number < self.below

    def describe_range(self) -> str:
        named = {"above {}": self.above, "{} or more": self.low, "below {}": self.below, "at most {}": self.high}
        found = [text.format(_write(bound)) for text, bound in named.items() if isfinite(bound)]
        start = "" if isfinite(max(self.above, self.low)) else "a finite number "
        return f"{start}{' and '.join(found)}".rstrip() + (f" ({self.why})" if self.why else "")


PLAIN = Key()


def _write(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


def key(
    default: Any = MISSING,
    *,
    factory: Callable[[], Any] | None = None,
    when: Effect | tuple[Effect, ...] = (),
    despite: Effect | tuple[Effect, ...] = (),
    kw_only: bool = False,
    **facts: Any,
) -> Any:
    """The field of a schema; facts: those of `Key`."""
    effects, without = ((each,) if isinstance(each, Effect) else each for each in (when, despite))
    found = Key(effects=effects, despite=without, **facts)
    values = {"default": default} if factory is None else {"default_factory": factory}
    return field(**values, kw_only=kw_only, metadata={"key": found})


def get_key(each: Field[Any]) -> Key:
    found: Key = each.metadata.get("key", PLAIN)
    return found


def with_choice(name: str, *choices: str) -> Effect:
    """Of what these choices of algo.NAME read, and a declaration of the user's own, which may read anything."""

    def counts(place: Any) -> bool:
        chosen = getattr(place.config.algo, name)
        return chosen in choices or ":" in chosen

    right = " or ".join(choices)
    return Effect(counts, f"under algo.{name}={{config.algo.{name}}}; it counts with algo.{name}={right}")


def needs(sibling: str, *values: str) -> Effect:
    """Of a key that counts where another one of its group has one of these values as they are typed; none: is on."""
    key, right = f"{{path}}.{sibling}", " or ".join(values) or "another value"
    text = f"with {key}={{found}}; it counts with " + (f"{key}={right}" if values else right)
    off = ("null", "false", "none", "0", "0.0")

    def counts(place: Any) -> bool:
        found = show(getattr(place.node, sibling))
        return found in values if values else found not in off

    return Effect(counts, text, sibling)


def show(value: Any) -> str:
    """A value as it is typed."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(getattr(value, "name", value))


YEAR_S = 31_536_000
DEADLINE: dict[str, Any] = {"low": 1, "high": YEAR_S, "why": "seconds; a busy machine answers no call in less"}
START: dict[str, Any] = {"low": 10, "high": YEAR_S, "why": "seconds; a process imports torch for as long"}

TRAINED = Effect(lambda it: it.command != "evaluate", "in an evaluation, which trains nothing; it counts in training")
EVALUATED = Effect(lambda place: place.command != "train", "in training; it counts in megarl evaluate")
GENERATED = Effect(
    lambda place: place.command != "train" or place.config.rollout.file is None,
    "with rollout.file, which is learned from without a server; it counts with rollout.file=null",
)
SAMPLED = Effect(
    lambda place: place.command != "train" or not place.config.rollout.from_data,
    "with rollout.from_data=true, where nothing is generated or scored; it counts with rollout.from_data=false",
)
NOT_ALONE = Effect(
    lambda place: place.command != "train" or not place.config.has_critic_alone,
    "where the critic alone learns, from saved rollouts or pairs; it counts with train.num_iterations above 0, and with"
    " algo.value_loss=squared",
)
WITHOUT_ADAPTERS = Effect(
    lambda place: not place.node.lora.rank,
    "with critic.lora.rank={node.lora.rank}, which trains adapters and the value head; it counts with"
    " critic.lora.rank=0",
)
WITH_CRITIC = Effect(
    lambda place: place.objective.needs_critic(place.config.algo),
    "under algo.advantage={config.algo.advantage}, which has no critic; it counts with algo.advantage=gae, tether or"
    " control_variate",
)
