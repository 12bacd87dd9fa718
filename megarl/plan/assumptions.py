"""What a plan takes as given and no formula says; each is printed with the plan."""

GIB = 1 << 30

PROCESS_GIB = 2.5
"""Of a GPU for each training process besides tensors: CUDA's context, NCCL's buffers, workspaces"""
ALLOCATOR_SHARE = 0.05
"""Of a training process's tensors at their peak: lost between the blocks of torch's allocator"""
SERVER_GIB = 4.0
"""Of a GPU for each server rank besides weights and KV cache: context, NCCL, CUDA graphs, activations"""
HOST_PROCESS_GIB = 6.0
"""Of a node's memory for each process: Python, CUDA's and torch's libraries, buffers"""

UPDATE_MFU = 0.40
"""Model FLOPs utilization of an update, against the peak; Megatron-LM's README has up to 0.47 on H100s"""
FORWARD_MFU = 0.45
"""Of log-probs and values"""
PREFILL_MFU = 0.40
DECODE_BANDWIDTH = 0.60
"""Of the peak between a GPU and its memory, while tokens are generated"""
DECODE_STEP_S = 0.006
"""Of each step of generation besides: scheduling, launches, all-reduces"""
LINK_SHARE = 0.80
"""Of the peak of NVLink and network, in a weight sync"""
MEAN_RESPONSE = 0.5
"""Mean length of a response over rollout.response_length; seconds follow from it, memory from the limit"""

SIGNAL_S = 600
"""Before a job's time limit in which Slurm says so (slurm/train.sh, --signal=B:USR1@600)"""
REQUEUE_S = 60
"""Of them that remain when the job is queued again, whatever the checkpoint does (slurm/train.sh, MARGIN_S)"""
LONGEST_SIGNAL_S = 65535
"""More sbatch does not take"""
