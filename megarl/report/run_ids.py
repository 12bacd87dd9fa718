"""RUN_DIR/sinks.json: the names under which other programs know this run, {"wandb": "3f9c...", "mlflow": "a81b..."}.

A resumed run continues there.
"""

import json
from pathlib import Path

from megarl.json_text import load_json_object

FILE_NAME = "sinks.json"


def load_id(run_dir: Path, sink: str) -> str | None:
    """None where the run is new to that sink. Raises ValueError naming a file that is not what `save_id` writes."""
    found = _load(run_dir).get(sink)
    return str(found) if found is not None else None


def save_id(run_dir: Path, sink: str, value: str) -> None:
    path = run_dir / FILE_NAME
    partial = path.with_name(f".{FILE_NAME}.partial")
    partial.write_text(json.dumps(_load(run_dir) | {sink: value}), encoding="utf-8")
    partial.replace(path)


def _load(run_dir: Path) -> dict[str, object]:
    path = run_dir / FILE_NAME
    try:
        return load_json_object(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ValueError(f"{error}; without the file the run is a new one there") from None
