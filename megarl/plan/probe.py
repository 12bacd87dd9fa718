"""`python -m megarl.plan.probe MODULE ...`: imports each module and prints a line of JSON for it.

It is a process of its own, so that a package that hangs or crashes does not affect its caller. Modules that exist only
for CUDA are skipped where torch is a CPU build. Without a GPU they are imported too, as on a login node: what is half
installed shows there as well.
"""

import contextlib
import importlib
import importlib.util
import io
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

CUDA_MODULES = ("megatron.core", "transformer_engine.pytorch", "sgl_kernel", "flashinfer", "apex")


def main(names: Sequence[str]) -> None:
    warnings.simplefilter("ignore")
    for name in names:
        say({"begins": name})
        problem = try_import(name)
        say({"module": name, "problem": problem})
        if name == "torch" and problem is None:
            found = describe_torch(sys.modules["torch"])
            say(found)
            if found["cuda"]:
                main(CUDA_MODULES)
            if found["gpus"]:
                # Of servers with rollout.offload, into whose processes it is preloaded instead of imported.
                from megarl.rollout.server import find_preload_problem

                say({"module": "torch_memory_saver", "problem": find_preload_problem()})


def try_import(name: str) -> str | None:
    """Why the module cannot be imported, in one line; None: it can be, or it is not installed."""
    try:
        if importlib.util.find_spec(name.split(".")[0]) is None:
            return None
        with contextlib.redirect_stdout(io.StringIO()):
            importlib.import_module(name)
    except BaseException as error:  # also SystemExit, and what extensions raise
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


def describe_torch(torch: Any) -> dict[str, Any]:
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": list(list_gpus(torch))}


def list_gpus(torch: Any) -> Iterator[tuple[str, tuple[int, int], float]]:
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        yield found.name, (found.major, found.minor), found.total_memory / 1e9


def say(found: dict[str, Any]) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
