#!/usr/bin/env bash
# Ray on one node: what train.sh has srun start on each, the head on the first. It stays until train.sh says by a file
# over-* in the job's folder that the run is over, and leaves nothing there; after over-failed Ray's own logs are kept,
# in MEGARL_LOG_DIR/ray-NODE.
#
# With SIGTERM, from scancel or a preemption, Slurm asks every process of the job to end: the driver writes a checkpoint
# with the processes that Ray holds here, which do not see the signal, and this ends after the driver.
# shellcheck disable=SC2329 # trap calls the function by its name
set -euo pipefail
# shellcheck source=slurm/clean.sh
source "$MEGARL_HOME/slurm/clean.sh"
exec >>"$MEGARL_LOG_DIR/node-$SLURMD_NODENAME.log" 2>&1

say() { echo "$(date '+%F %T') $SLURMD_NODENAME: $*"; }

END_S=6 # of Ray's processes; Slurm kills KillWait (30) seconds after scancel
# Short, since unix sockets are made under it; the number, since nodes may share a machine.
scratch=/tmp/megarl-ray-$SLURM_JOB_ID-$SLURM_PROCID

end() {
  local code=$?
  trap '' TERM INT HUP
  [[ -n $over ]] || { over='over-failed' && echo "node.sh: code $code" >"$MEGARL_JOB_DIR/ended-$SLURMD_NODENAME"; } ||:
  if [[ -n ${ray:-} ]]; then
    # Its workers end where it is gone, and servers clean up where their worker is. Its agents would wait for SIGTERM.
    kill -KILL "$ray" 2>/dev/null || true
    wait "$ray" 2>/dev/null || true
    list_marked "$scratch" | sed 's,.*,/proc/&/comm,' |
      xargs -r grep -lsxE 'raylet|gcs_server|ray::DashboardA|ray::RuntimeEnv' |
      grep -oE '[0-9]+' | xargs -r kill -KILL || true
    wait_until "$END_S" are_gone "$scratch" || say "Ray did not end within $END_S s; killed"
  fi
  wait_until 6 kill_marked "$scratch" || true
  if [[ $over == over-failed ]]; then
    rm -rf "$MEGARL_LOG_DIR/ray-$SLURMD_NODENAME"
    cp -rL "$scratch/session_latest/logs" "$MEGARL_LOG_DIR/ray-$SLURMD_NODENAME" 2>/dev/null || true
  fi
  rm -rf "$scratch"
  remove_left_over
}

# Set `over` where the run is: train.sh says so, or it is gone after SIGTERM, and with it the first node's Ray.
is_over() {
  # Reading the folder shows what is new in it on NFS, too.
  over=$(find "$MEGARL_JOB_DIR" -name 'over-*' -printf %f 2>/dev/null) || true
  [[ -n $over || -z $asked ]] || timeout 2 bash -c ": <>/dev/tcp/${address/://}" 2>/dev/null || over='over-lost'
  [[ -n $over ]]
}

# A function, since bash reads a file as it runs it, and the checkout may be another one by the end of the job.
main() {
  over='' asked='' address=''
  trap end EXIT
  trap 'asked=TERM' TERM INT HUP

  # An earlier start of this job, on a node that was lost, may have left some.
  wait_until 6 kill_marked "$scratch" || true
  rm -rf "$scratch"
  mkdir -m 700 "$scratch"
  ulimit -n "$(ulimit -Hn)" 2>/dev/null || true
  ulimit -l unlimited 2>/dev/null || true

  MEGARL_GPUS=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((${SLURM_GPUS_ON_NODE:-0} - 1)))}
  # For train.sh --attach.
  declare -p PATH "${!MEGARL_@}" "${!RAY_@}" "${!PYTHONPATH@}" >"$scratch/environment"
  export MEGARL_GPUS MEGARL_MARK=$scratch
  # Ray would wait half a minute for work to move to other nodes; the run has ended by then.
  export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0

  # Kernels that are compiled during a run: Triton's, TorchInductor's, FlashInfer's, DeepGEMM's and SGLang's own.
  cache=$MEGARL_KERNEL_CACHE
  mkdir -p -m 700 "$cache" || true
  [[ -O $cache ]] || cache=$HOME/.cache/megarl-kernels # it is another user's
  export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache/triton}
  export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor}
  export FLASHINFER_WORKSPACE_BASE=${FLASHINFER_WORKSPACE_BASE:-$cache/flashinfer}
  export DG_JIT_CACHE_DIR=${DG_JIT_CACHE_DIR:-$cache/deep_gemm}
  export SGLANG_DG_CACHE_DIR=${SGLANG_DG_CACHE_DIR:-$cache/deep_gemm}
  # The active InfiniBand ports as mlx5_0:1,mlx5_1:1, none as with RoCE. NCCL would also take Ethernet ports that speak
  # RDMA, such as a storage network's.
  ports=$(grep -lsx InfiniBand /sys/class/infiniband/*/ports/*/link_layer | sed 's,link_layer$,state,' |
    xargs -r grep -ls ACTIVE | sed -E 's,.*/infiniband/(.*)/ports/(.*)/state,\1:\2,' | paste -sd,) || true
  [[ -z $ports ]] || export NCCL_IB_HCA="${NCCL_IB_HCA:-=$ports}"

  # megarl counts the GPUs itself. Every port is the kernel's choice: a neighbour's job may be on the node.
  options=(
    --block --disable-usage-stats --node-name="$SLURMD_NODENAME" --temp-dir="$scratch" --num-cpus=1 --num-gpus=0
    --object-store-memory=$(($(sed -n 's/^MEGARL_OBJECT_STORE_MB=//p' "$MEGARL_JOB_DIR/settings") * 1024 * 1024))
    --include-log-monitor=false --dashboard-agent-listen-port=0
  )
  if [[ -n ${MEGARL_INTERFACE:-} ]]; then
    own=$(ip -4 -o addr show dev "$MEGARL_INTERFACE" | awk '{ sub("/.*", "", $4); print $4; exit }')
    options+=(--node-ip-address="$own")
  fi
  if ((SLURM_PROCID == 0)); then
    # The one port that Ray does not leave to the kernel; not one of those that the kernel gives away meanwhile.
    options+=(--head --port=0 --include-dashboard=false --no-monitor --ray-client-server-port="$("$MEGARL_PYTHON" -c '
from megarl.signals import pick_free_port; print(pick_free_port(""))')")
  else
    until [[ -s $MEGARL_JOB_DIR/address ]]; do
      ! is_over || exit 0
      sleep 0.5 || true
    done
    address=$(<"$MEGARL_JOB_DIR/address")
    options+=(--address="$address")
  fi

  say "Ray in $scratch, GPUs ${MEGARL_GPUS:-none}, NCCL_IB_HCA ${NCCL_IB_HCA:-unset}, kernels in $cache"
  # SIGTERM blocked, in all processes of Ray: a trap is not inherited, and Ray sets its own.
  "$MEGARL_PYTHON" -c 'import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.execv(sys.executable, [sys.executable, "-m", "ray.scripts.scripts", "start", *sys.argv[1:]])' "${options[@]}" &
  ray=$!
  until is_over; do
    kill -0 "$ray" 2>/dev/null || break
    # Ray writes it once the head runs; renamed, so that nobody reads half of it.
    if ((SLURM_PROCID == 0)) && [[ -z $address && -s $scratch/ray_current_cluster ]]; then
      address=$(<"$scratch/ray_current_cluster")
      echo "$address" >"$MEGARL_JOB_DIR/.address" && mv "$MEGARL_JOB_DIR/.address" "$MEGARL_JOB_DIR/address"
    fi
    sleep 0.5 || true
  done
  if [[ -n $over ]]; then
    say "Ray is ended with the run ($over)"
    exit 0
  fi
  code=0
  wait "$ray" || code=$?
  over='over-failed'
  said=$(cd "$scratch/session_latest/logs" &&
    sed -nE 's/^ *([a-z_]+ \[exit code=-?[0-9]+).*/\1]/p' ray_process_exit.log | tail -n 1) || true
  echo "${said:-code $code}" >"$MEGARL_JOB_DIR/ended-$SLURMD_NODENAME" || true
  say "Ray has ended with code $code"
  exit 1
}
main
