"""The assumptions of a plan that no formula gives; each is printed with the plan."""

GIB = 1 << 30

PROCESS_GIB = 2.5
"""GPU memory per training process besides tensors: CUDA's context, NCCL's buffers, workspaces"""
ALLOCATOR_SHARE = 0.05
"""Share of a training process's peak tensor memory that torch's allocator loses to fragmentation"""
SERVER_GIB = 4.0
"""GPU memory per server rank besides weights and KV cache: context, NCCL, CUDA graphs, activations"""
HOST_PROCESS_GIB = 6.0
"""Host memory per process: Python, CUDA's and torch's libraries, buffers"""

UPDATE_MFU = 0.40
"""Model FLOPs utilization of an update, against the peak; Megatron-LM's README has up to 0.47 on H100s"""
FORWARD_MFU = 0.45
"""Model FLOPs utilization of log-probs and values"""
PREFILL_MFU = 0.40
DECODE_BANDWIDTH = 0.60
"""Share of the GPU's peak memory bandwidth during generation"""
DECODE_STEP_S = 0.006
"""Additional time of each generation step: scheduling, kernel launches, all-reduces"""
LINK_SHARE = 0.80
"""Share of the peak bandwidth of NVLink and network in a weight sync"""
MEAN_RESPONSE = 0.5
"""Mean response length as a share of rollout.response_length; seconds follow from it, memory from the limit"""

SIGNAL_S = 600
"""How long before a job's time limit Slurm signals it (slurm/train.sh, --signal=B:USR1@600)"""
REQUEUE_S = 60
"""How long before the limit the job is requeued, with or without a checkpoint (slurm/train.sh, MARGIN_S)"""
LONGEST_SIGNAL_S = 65535
"""The largest value that sbatch accepts"""
