"""The scripts under tools/ as modules: they are no package, so that tests load them by their files."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TOOLS = Path(__file__).resolve().parents[1] / "tools"


def load_tool(path: str) -> ModuleType:
    """tools/PATH, run anew with each call; its `main` is not called."""
    file = TOOLS / path
    name = f"megarl_tool_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Its dataclasses look themselves up.
    spec.loader.exec_module(module)
    return module
