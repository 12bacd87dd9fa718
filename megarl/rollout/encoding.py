"""Observations as tokens: only what is new is encoded, and what was generated is never encoded again."""

from collections.abc import Sequence

from megarl.data.render import Renderer
from megarl.environment.interface import Observation
from megarl.types import Message, Prompt

QUESTION, ANSWER = "QUESTION", "MEGARL-ANSWER"
"""Contents of the conversation in which a chat template shows what stands between an answer and the next one"""


class ObservationEncoder:
    """Encodes what an environment says for one tokenizer, with its chat template where the data use it."""

    def __init__(self, renderer: Renderer):
        """renderer: of the prompts."""
        self._renderer = renderer
        self._tokenizer = renderer.tokenizer
        self._special = sorted(set(renderer.tokenizer.all_special_tokens), key=len, reverse=True)

    def start(self, prompt: Prompt, observation: Observation) -> Prompt:
        """The prompt with the observation in place of its text.

        Raises ConfigError where the tokenizer cannot read it, or its chat template refuses the messages.
        """
        messages = self._to_messages(observation)
        if messages is None:
            ids = tuple(int(token) for token in observation)  # type: ignore[arg-type]
            text = self.decode(ids)
        else:
            text = self._renderer.render_messages(messages)
            (ids,) = self._renderer.tokenize([text])
        return Prompt(prompt.id, text, ids, prompt.answer, prompt.metadata, messages or (), prompt.columns)

    def encode(self, observation: Observation, last_token: int) -> list[int]:
        """Token ids from the end of an action to the beginning of the next one.

        last_token: the action's last token; where it is what a chat template ends an answer with, that is not
        repeated. Raises as `start`.
        """
        messages = self._to_messages(observation)
        if messages is None:
            return [int(token) for token in observation]  # type: ignore[arg-type]
        if self._renderer.uses_template:
            conversation = (Message("user", QUESTION), Message("assistant", ANSWER), *messages)
            text = self._renderer.render_messages(conversation).partition(ANSWER)[2]
            text = text.removeprefix(self.decode([last_token]))
        else:
            text = "".join(message.content for message in messages)
        return list(self._renderer.tokenize([text], add_special_tokens=False)[0])

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, special ones included."""
        return str(self._tokenizer.decode(list(token_ids)))

    def _to_messages(self, observation: Observation) -> tuple[Message, ...] | None:
        """None for token ids."""
        if isinstance(observation, str):
            return (Message("user", self._defuse(observation)),)
        if all(isinstance(part, Message) for part in observation):
            return tuple(Message(m.role, self._defuse(m.content)) for m in observation)  # type: ignore[union-attr]
        return None

    def _defuse(self, content: str) -> str:
        """The content with a space in what the tokenizer would read as a special token: it may not end its message."""
        for token in self._special:
            if len(token) > 1:
                content = content.replace(token, f"{token[0]} {token[1:]}")
        return content
