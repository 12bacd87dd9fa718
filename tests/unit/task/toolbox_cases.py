"""Tools as a user writes them, for the tests; their processes import this module."""

import asyncio
import os
import time


def echo(text: str, times: int = 1) -> str:
    """Repeat a text.

    Args:
        text: What is repeated.
        times: How often.
    """
    print("noise that must not mix with the answers")
    return text * times


def fail(reason: str) -> str:
    """Raise an error.

    Args:
        reason: Its text.
    """
    raise ValueError(reason)


def hang() -> str:
    """Never return."""
    time.sleep(600)
    return ""


def fill() -> str:
    """Take more memory than there is."""
    return str(len(bytearray(2**36)))


def die() -> str:
    """End the process."""
    os._exit(3)


async def wait(seconds: float) -> dict[str, float]:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return {"waited": seconds}


def undescribed(x):
    return x


NUMBER = 3
