"""Prompt and response as the messages of a chat."""

from megarl.types import Message, Prompt, Response


def list_messages(prompt: Prompt, response: Response) -> list[dict[str, str]]:
    """The messages that the prompt renders, and the response as the assistant's.

    Of an episode of several turns the response is the last action. A prompt that is known as text alone is one message.
    """
    asked = prompt.messages or (Message("user", prompt.text),)
    return [{"role": m.role, "content": m.content} for m in (*asked, Message("assistant", response.text))]


def find_question(prompt: Prompt) -> str:
    """The last message of the user; the whole text of a prompt that is known as text alone."""
    questions = [message.content for message in prompt.messages if message.role == "user"]
    return questions[-1] if questions else prompt.text
