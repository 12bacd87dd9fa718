"""The allocation that cluster=slurm is checked against outside of a job: the one that slurm/train.sh requests."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.doctor.need import find_choice

TRAIN = Path(__file__).resolve().parents[1] / "slurm" / "train.sh"
IN_A_JOB = "SLURM_JOB_NUM_NODES"
KEYS = {"nodes": "cluster.num_nodes", "gpus-per-node": "cluster.gpus_per_node"}
"""The key of conf/cluster/slurm.yaml that each option of sbatch sets"""


def assume_allocation(overrides: Sequence[str], environment: Mapping[str, str], script: Path = TRAIN) -> list[str]:
    """Overrides from the script's #SBATCH lines, for keys that are not given; empty in a job and for other clusters."""
    if find_choice(overrides, "cluster") != "slurm" or environment.get(IN_A_JOB) or not script.is_file():
        return []
    given = {text.partition("=")[0].lstrip("+") for text in overrides}
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\d+)$", script.read_text(), flags=re.MULTILINE))
    return [f"{key}={options[name]}" for name, key in KEYS.items() if name in options and key not in given]
