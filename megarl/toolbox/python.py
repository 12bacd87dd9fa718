"""The tool `python`: a program in the sandbox."""

from megarl.sandbox.program import Limits, run_python

WALL_S = 5.0


def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program. It has the standard library, no files and no network; what it prints is returned.
    """
    done = run_python(code, limits=Limits(wall_s=WALL_S))
    if done.is_well:
        return done.stdout
    return f"{done.stdout}error: {done.describe()}"
