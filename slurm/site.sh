# shellcheck shell=bash
# What differs from site to site, sourced by train.sh on the first node. Copy it, or name another file in MEGARL_SITE.
# A value that the environment of sbatch already has stays.

# Python is in a virtual environment that every node sees (tools/install/install.sh cuda makes .venv), or in a
# container: `pyxis` starts IMAGE through srun --container-image (pyxis and enroot), `apptainer` through apptainer exec.
# Each of four steps gets at the image anew: a FILE.sqsh or FILE.sif is at hand where a registry's is fetched.
MEGARL_CONTAINER=${MEGARL_CONTAINER:-none} # none, pyxis or apptainer
MEGARL_IMAGE=${MEGARL_IMAGE:-}             # registry#name:tag or FILE.sqsh; FILE.sif
# MEGARL_KEEP_CONTAINER=1 # with pyxis all steps share one container by its name, where the site lets a job keep it
[[ $MEGARL_CONTAINER == none ]] || MEGARL_PYTHON=${MEGARL_PYTHON:-/opt/megarl/.venv/bin/python} # slurm/Dockerfile's
MEGARL_PYTHON=${MEGARL_PYTHON:-$(command -v "$MEGARL_HOME/.venv/bin/python" python3 | head -n 1)}
# Further directories to be seen inside, such as those of models and data. The code, the folder of the job, /tmp and
# /dev/shm always are: driver and workers share files there.
# MEGARL_MOUNTS=SRC:DST,SRC:DST
# export MEGARL_PREFLIGHT_S=900 MEGARL_HEAD_S=900 # for a look at the nodes, and Ray's start, an image unpacked (300)

# Outside of a container: the toolkit of the CUDA that torch is built for (cuda-toolkit in tools/install/cuda.lock), or
# another of its major version; SGLang compiles kernels with its nvcc.
# module purge; module load cuda/13.0

# The interface over which Ray, gloo and NCCL's bootstrap talk, that one alone; empty: the one of the default route.
MEGARL_INTERFACE=${MEGARL_INTERFACE:-}
[[ -z $MEGARL_INTERFACE ]] || export NCCL_SOCKET_IFNAME="=$MEGARL_INTERFACE"
# InfiniBand:  export NCCL_IB_TIMEOUT=22 NCCL_IB_RETRY_CNT=7; each node sets an unset NCCL_IB_HCA itself
# RoCE:        export NCCL_IB_GID_INDEX=3 NCCL_IB_TC=106
# NVLink SHARP: export NCCL_NVLS_ENABLE=1 NCCL_CUMEM_ENABLE=1
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} # INFO says at the start which of them NCCL uses

# Compiled kernels, on each node's own disk: a shared one is locked and written by all nodes at once. They stay.
export MEGARL_KERNEL_CACHE=${MEGARL_KERNEL_CACHE:-/tmp/megarl-kernels-$(id -u)}
# A cache of the Hugging Face hub that every node sees; model.path names a model in it, or a directory.
# export HF_HOME=/shared/huggingface
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} # nodes without a way out do not wait for one
