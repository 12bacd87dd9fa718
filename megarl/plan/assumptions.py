"""The assumptions of a plan that no formula gives; those that count most are printed with the plan."""

GIB = 1 << 30

PROCESS_GIB = 2.5
"""GPU memory per training process besides tensors: CUDA's context, NCCL's buffers, workspaces"""
ALLOCATOR_SHARE = 0.05
"""Share of a training process's peak tensor memory that torch's allocator loses to fragmentation"""
SERVER_GIB = 4.0
"""GPU memory per server rank besides weights and KV cache: context, NCCL, CUDA graphs, activations"""
HOST_PROCESS_GIB = 6.0
"""Host memory per process: Python, CUDA's and torch's libraries, buffers"""

PRODUCT_SHARE = 0.72
"""Share of the bfloat16 peak in matrix products"""
FP8_SHARE = 0.62
"""Share of the FP8 peak in matrix products, casts included"""
ATTENTION_SHARE = 0.50
"""Share of the bfloat16 peak in attention's core (FlashAttention-3, 2407.08608: 0.5 to 0.75 forward, less backward)"""
MEMORY_SHARE = 0.80
"""Share of the memory's bandwidth in all other operations"""
MEMORY_PASSES = 2.0
"""How often a forward pass moves what a layer keeps: written once and read once"""
LOGIT_PASSES = 4.0
"""How often log-probs move the logits as float32"""
LAYER_S = 0.0003
"""Seconds of a layer's forward pass besides its tokens"""
EXPERT_LAYER_S = 0.003
"""The same of a layer with experts, in which the host counts each expert's tokens"""
PREFILL_SHARE = 0.45
"""Share of the peak in reading prompts"""
DECODE_SHARE = 0.50
"""Share of the peak in the matrix products of a generation step"""
DECODE_BANDWIDTH = 0.60
"""Share of the GPU's peak memory bandwidth during generation"""
DECODE_STEP_S = 0.006
"""Additional time of each generation step: scheduling, kernel launches, all-reduces"""
LINK_SHARE = 0.80
"""Share of the peak bandwidth of NVLink, network and PCIe"""
MEAN_RESPONSE = 0.5
"""Mean response length as a share of rollout.response_length; seconds follow from it, memory from the limit"""

SIGNAL_S = 600
"""How long before a job's time limit Slurm signals it (slurm/train.sh, --signal=B:USR1@600)"""
REQUEUE_S = 60
"""How long before the limit the job is requeued, with or without a checkpoint (slurm/train.sh, MARGIN_S)"""
LONGEST_UNSAVED_S = 4500
"""Seconds of training that a lost node may cost at most, unless one iteration takes longer: about an hour"""
LONGEST_SIGNAL_S = 65535
"""The largest value that sbatch accepts"""
