"""Directories that are made once: built beside their place under a temporary name, then renamed into it."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from megarl.config.errors import ConfigError


def default_cache_dir() -> Path:
    """$MEGARL_CACHE, or ~/.cache/megarl where that is unset or empty."""
    configured = os.environ.get("MEGARL_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "megarl"


def build_once(directory: Path, build: Callable[[Path], None]) -> Path:
    """`directory`, after `build(temporary directory)` filled it, unless it is there already.

    A `directory` that exists is complete: it appears by one rename. Of several processes that build it at the
    same time one wins, and all return its result. Whatever `build` raises passes through and leaves nothing. Raises
    ConfigError where nothing can be written there.
    """
    if directory.is_dir():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    except OSError as error:
        raise ConfigError(
            [
                f"MEGARL_CACHE: found {os.environ.get('MEGARL_CACHE') or 'nothing, which is ~/.cache/megarl'}; the"
                f" model cannot be written to {directory} ({error.strerror}); it must be a directory of this user's"
            ]
        ) from error
    try:
        build(temporary)
        temporary.chmod(0o755)
        with contextlib.suppress(OSError):  # Another process was faster: its directory is not empty.
            temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if not directory.is_dir():
        raise OSError(f"{directory}: could not be put in place (is there a file of that name?)")
    return directory
