"""A job of 64 GPUs whose roles have GPUs of their own."""

PRESET = ("algo=vapo", "model=qwen32b", "cluster=h100x64")
LAYOUT = "{num_processes: 16, tp: 8, sp: true, pp: 1, cp: 2}"
APART = (
    *("cluster.placement=apart", "rollout.transport=split", "rollout.num_servers=8", "rollout.tp=4"),
    *(f"{role}.{value}" for role in ("policy", "critic") for value in (f"parallel={LAYOUT}", "recompute=full")),
    *("policy.offload=null", "critic.offload=null", "rollout.offload=null", "train.tokens_per_microbatch=16384"),
)
QWEN32B = (*PRESET, *APART)
