"""One value pretraining shared by the runs of a sweep that would do the same: SWEEP_DIR/value_pretrain_DIGEST.

It is a run of `python -m megarl.pretrain_value`, started by the first run that needs it. The runs start from it with
algo.value_pretrain.taken_from; only times then differ from a run alone (megarl/value_pretraining/result.py). The
configuration decides which runs share one (megarl/value_pretraining/inputs.py): a sweep over clip_high or the policy's
learning rate has one value pretraining, a sweep over seeds or models one for each.
"""

import contextlib
import fcntl
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from megarl.algo.registry import needs_critic
from megarl.checkpoint.folder import open_pretraining, remove_pretraining
from megarl.checkpoint.manifest import NAME as MANIFEST
from megarl.checkpoint.manifest import CheckpointError
from megarl.config.checks.unused import find_unused
from megarl.config.run_name import digest
from megarl.config.schema.root import Config
from megarl.config.words import list_set_keys
from megarl.report.outcome import Outcome, State, clear_outcome, write_outcome
from megarl.report.sweep import PRETRAINING_PREFIX
from megarl.value_pretraining.inputs import list_pretraining_inputs

STATE_FOLDER = "pretrained"
OTHERS_DEADLINE_S = 4 * 3600.0
"""How long a run waits for the value pretraining of another run of the sweep."""
POLL_S = 1.0
_failed: set[Path] = set()
"""Folders in which value pretraining has failed in this process"""


def find_folder(config: Config, sweep_dir: Path) -> Path | None:
    """The folder of this configuration's value pretraining, whether it exists or not; None where none is needed."""
    settings = config.algo.value_pretrain
    if not needs_critic(config.algo) or settings.num_steps == 0 or settings.taken_from is not None:
        return None
    return sweep_dir / f"{PRETRAINING_PREFIX}{digest(list_pretraining_inputs(config))}"


def is_complete(folder: Path) -> bool:
    return (folder / STATE_FOLDER / MANIFEST).is_file()


def share_pretraining(
    config: Config,
    overrides: Sequence[str],
    sweep_dir: Path,
    run: Callable[[Sequence[str], Path], str | None],
    say: Callable[[str], None],
    wait_s: float = OTHERS_DEADLINE_S,
) -> Path | None:
    """The folder of a complete value pretraining for this run, which is started or resumed where it is not complete.

    run: runs `megarl.pretrain_value` with these overrides in a folder, and returns why it failed, or None. Returns None
    where the run has to do its own: it needs none, it has failed, or another process still runs it after `wait_s`.
    """
    folder = find_folder(config, sweep_dir)
    if folder is None or folder in _failed or is_complete(folder):
        return None if folder in _failed else folder
    with _locking(sweep_dir / f".{folder.name}.lock", wait_s) as is_mine:
        if is_complete(folder):
            remove_pretraining(folder)
            return folder
        if not is_mine:
            say(f"{folder.name}: another process still runs it after {wait_s:g} s; this run does its own")
            return None
        why = _make(folder, lambda: run(list_pretraining_overrides(config, overrides), folder), say)
        write_outcome(folder, Outcome(State.failed, why) if why else Outcome(State.done))
    if is_complete(folder):
        return folder
    say(f"{folder.name}: failed: {why}; each run does its own")
    _failed.add(folder)
    return None


def _make(folder: Path, run: Callable[[], str | None], say: Callable[[str], None]) -> str | None:
    """Start or resume it; returns why it failed, or None. With a damaged checkpoint it is started over."""
    while True:
        begun = open_pretraining(folder).list_complete()
        if not begun:
            shutil.rmtree(folder, ignore_errors=True)
        clear_outcome(folder)
        again = " resumes" if begun else ""
        say(f"{folder.name}: value pretraining{again}, shared by all runs of the sweep that would do the same")
        why = run()
        if why is None and not is_complete(folder):
            why = f"it succeeded, but left no {STATE_FOLDER}/{MANIFEST}"
        if why is None or not begun:
            return why
        try:
            open_pretraining(folder).find_newest(say)
            return why
        except CheckpointError as error:
            say(f"{folder.name}: {error}; it is started over")
            shutil.rmtree(folder, ignore_errors=True)


def list_pretraining_overrides(config: Config, overrides: Sequence[str]) -> list[str]:
    """The overrides that `megarl.pretrain_value` accepts: without the keys that have no effect there."""
    kept: list[str] = []
    for text in overrides:
        keys = list_set_keys(text)
        unused = {key for key, _ in find_unused(config, keys, "pretrain_value")}
        if not unused:
            kept.append(text)
        elif unused != set(keys):
            kept += [f"++{key}={value}" for key, value in _flatten(text) if key not in unused]
    return kept


def _flatten(override: str) -> Iterator[tuple[str, str]]:
    """(dotted key, value as Hydra reads it) of each leaf of `key={...}`."""
    parsed = OverridesParser.create().parse_override(override)

    def walk(key: str, value: object) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict) and value:
            for name, child in value.items():
                yield from walk(f"{key}.{getattr(name, 'text', name)}", child)
        else:
            yield key, str(Override._get_value_element_as_str(value))  # type: ignore[arg-type]

    yield from walk(parsed.get_key_element().lstrip("+"), parsed.value())


@contextlib.contextmanager
def _locking(path: Path, wait_s: float) -> Iterator[bool]:
    """Takes the lock, waiting at most `wait_s`; yields whether this process holds it. Its end frees the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + wait_s
    with path.open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end:
                    yield False
                    return
                time.sleep(POLL_S)
            else:
                yield True
                return
