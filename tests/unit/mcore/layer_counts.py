"""`python layer_counts.py LAYERS`: the parameters of every model preset, built on torch's meta device, as JSON.

LAYERS: `local`, or `transformer_engine`. The latter needs no GPU and no driver, only that Megatron takes this machine
for one with a GPU: what it asks of one while it builds a model is answered here.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[3]
LAYERS = {"local": "local layers", "transformer_engine": "Transformer Engine's layers"}
WITHOUT_SIZES = ("checkpoint", "smollm2_135m")
"""Presets whose sizes are in a file: that of model.path, and that of an extra"""


def pretend_gpu() -> None:
    """Before megarl.mcore is imported, which would prepare Megatron for the CPU."""
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.Stream = lambda *args, **kwargs: None
    # It is linked against libcuda.so.1, which only a driver installs; Megatron can do without.
    sys.modules["flash_mla"] = None


def list_presets() -> list[str]:
    names = sorted(path.stem for path in (ROOT / "conf" / "model").glob("*.yaml"))
    return [name for name in names if name not in WITHOUT_SIZES]


def count_preset(name: str) -> dict[str, list[dict[str, int]]]:
    """For policy and critic, the parameters of a rank of each pipeline stage of the preset's own layout."""
    from megarl.config.load import load_config
    from megarl.mcore.model import count_stages
    from megarl.plan.job import find_models

    config = load_config(["algo=vapo", f"model={name}"])
    models = find_models(config)
    roles = {"policy": (config.policy, models.policy), "critic": (config.critic, models.critic)}
    return {
        role: [
            dataclasses.asdict(stage)
            for stage in count_stages(arch, keys.parallel, keys.dtype, config.model.megatron, role == "critic")
        ]
        for role, (keys, arch) in roles.items()
    }


def main(layers: str) -> None:
    with_te = layers == "transformer_engine"
    if with_te and not torch.cuda.is_available():
        pretend_gpu()
    from megarl.mcore import layers as modules

    if not with_te:
        modules.has_transformer_engine = lambda: False
    assert modules.find_layers().name == LAYERS[layers]
    print(json.dumps({name: count_preset(name) for name in list_presets()}))


if __name__ == "__main__":
    main(sys.argv[1])
