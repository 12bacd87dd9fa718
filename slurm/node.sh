#!/usr/bin/env bash
# Ray on one node: what train.sh has srun start on each. It stays until the driver has ended, and leaves nothing there.
#
# SIGUSR2 from train.sh ends it; SIGUSR1 too, and Ray's own logs are kept in MEGARL_LOG_DIR/ray-NODE. With SIGTERM, from
# scancel or a preemption, Slurm asks every process of the job to end: the driver writes a checkpoint with the processes
# that Ray holds here, which do not see the signal, and this ends after the driver.
# shellcheck disable=SC2329 # trap calls the function by its name
set -euo pipefail
# shellcheck source=slurm/clean.sh
source "$MEGARL_HOME/slurm/clean.sh"

log=$MEGARL_LOG_DIR/node-$SLURMD_NODENAME.log
log_begin=$(stat -c %s "$log" 2>/dev/null || echo 0) # earlier starts have written there
exec >>"$log" 2>&1

END_S=6    # of Ray's processes; Slurm kills KillWait (30) seconds after scancel
DRIVER_S=2 # until the first node's Ray says that it is still there
# SIGTERM blocked, in all processes of Ray: a trap is not inherited, and Ray sets its own.
START_RAY='
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.execv(sys.executable, [sys.executable, "-m", "ray.scripts.scripts", "start", *sys.argv[1:]])
'

IFS=, read -ra nodes <<<"$MEGARL_NODES"
number=0
while [[ ${nodes[number]} != "$SLURMD_NODENAME" ]]; do number=$((number + 1)); done
# Short, since unix sockets are made under it; the number, since nodes may share a machine.
scratch=/tmp/megarl-ray-$SLURM_JOB_ID-$number

end() {
  trap '' TERM INT HUP USR1 USR2
  if [[ -n ${ray:-} ]]; then
    # Its workers end where it is gone, and servers clean up where their worker is. Its agents would wait for SIGTERM.
    kill -KILL "$ray" 2>/dev/null || true
    wait "$ray" 2>/dev/null || true
    kill_marked "$scratch" raylet gcs_server ray::DashboardA ray::RuntimeEnv
    wait_until "$END_S" are_gone "$scratch" || echo "$SLURMD_NODENAME: Ray did not end within $END_S s; killed"
  fi
  kill_marked "$scratch"
  if [[ $over == USR1 ]]; then
    rm -rf "$MEGARL_LOG_DIR/ray-$SLURMD_NODENAME"
    cp -rL "$scratch/session_latest/logs" "$MEGARL_LOG_DIR/ray-$SLURMD_NODENAME" 2>/dev/null || true
  fi
  rm -rf "$scratch"
  remove_left_over
}

# Whether the driver is there: on the first node itself, elsewhere by the first node's Ray, which ends after it.
has_driver() {
  if ((number == 0)); then
    ! are_gone "driver-$SLURM_JOB_ID"
  else
    timeout "$DRIVER_S" bash -c ": <>/dev/tcp/${MEGARL_RAY_ADDRESS%:*}/${MEGARL_RAY_ADDRESS##*:}" 2>/dev/null
  fi
}

# The active InfiniBand ports under $1 as mlx5_0:1,mlx5_1:1; nothing where there are none, as with RoCE.
find_infiniband() {
  local port
  for port in "$1"/*/ports/*; do
    if grep -qs ACTIVE "$port/state" && grep -qsx InfiniBand "$port/link_layer"; then
      port=${port#"$1"/}
      echo "${port/\/ports\//:}"
    fi
  done | paste -sd,
}

# A function, since bash reads a file as it runs it, and the checkout may be another one by the end of the job.
main() {
  over='' asked=''
  trap end EXIT
  trap 'over=USR1' USR1
  trap 'over=USR2' USR2
  trap 'asked=TERM' TERM INT HUP

  # An earlier start of this job, on a node that was lost, may have left some.
  kill_marked "$scratch"
  rm -rf "$scratch"
  mkdir -m 700 "$scratch"
  ulimit -n "$(ulimit -Hn)" 2>/dev/null || true
  ulimit -l unlimited 2>/dev/null || true

  ids=${CUDA_VISIBLE_DEVICES:-}
  if [[ -z $ids && ${SLURM_GPUS_ON_NODE:-0} -gt 0 ]]; then
    ids=$(seq -s, 0 $((SLURM_GPUS_ON_NODE - 1)))
  fi
  export MEGARL_GPUS=$ids MEGARL_MARK=$scratch
  # Ray would wait half a minute for work to move to other nodes; the run has ended by then.
  export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0

  # Kernels that are compiled during a run: Triton's, TorchInductor's, FlashInfer's, DeepGEMM's and SGLang's own.
  cache=$MEGARL_KERNEL_CACHE
  if mkdir -p -m 700 "$cache" && [[ -O $cache ]]; then
    export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache/triton} TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor}
    export FLASHINFER_WORKSPACE_BASE=${FLASHINFER_WORKSPACE_BASE:-$cache/flashinfer} DG_JIT_CACHE_DIR=${DG_JIT_CACHE_DIR:-$cache/deep_gemm}
    export SGLANG_DG_CACHE_DIR=${SGLANG_DG_CACHE_DIR:-$cache/deep_gemm}
  else
    echo "$SLURMD_NODENAME: MEGARL_KERNEL_CACHE: $cache is not this user's; kernels are cached at home"
  fi
  # NCCL would also take Ethernet ports that speak RDMA, such as a storage network's.
  if [[ -z ${NCCL_IB_HCA:-} ]] && ports=$(find_infiniband /sys/class/infiniband) && [[ -n $ports ]]; then
    export NCCL_IB_HCA="=$ports"
    echo "$SLURMD_NODENAME: NCCL_IB_HCA==$ports"
  fi

  # megarl counts the GPUs itself. Every port is the kernel's choice: a neighbour's job may be on the node.
  options=(
    --block --disable-usage-stats --node-name="$SLURMD_NODENAME" --temp-dir="$scratch" --num-cpus=1 --num-gpus=0
    --object-store-memory=$((MEGARL_OBJECT_STORE_MB * 1024 * 1024)) --include-log-monitor=false
    --dashboard-agent-listen-port=0
  )
  if [[ -n ${MEGARL_INTERFACE:-} ]]; then
    address=$(ip -4 -o addr show dev "$MEGARL_INTERFACE" | awk '{ sub("/.*", "", $4); print $4; exit }')
    options+=(--node-ip-address="$address")
  fi
  if ((number == 0)); then
    # The one port that Ray does not leave to the kernel; not one of those that the kernel gives away meanwhile.
    port=$("$MEGARL_PYTHON" -c 'from megarl.signals import pick_free_port; print(pick_free_port(""))')
    options+=(--head --port=0 --ray-client-server-port="$port" --include-dashboard=false --no-monitor)
  else
    options+=(--address="$MEGARL_RAY_ADDRESS")
  fi

  echo "$(date '+%F %T') $SLURMD_NODENAME: Ray in $scratch, GPUs ${ids:-none}"
  "$MEGARL_PYTHON" -c "$START_RAY" "${options[@]}" &
  ray=$!
  if ((number == 0)); then
    # Ray writes it once the head runs; renamed, so that nobody reads half of it.
    until [[ -s $scratch/ray_current_cluster || -n $over$asked ]]; do
      kill -0 "$ray" 2>/dev/null || break
      sleep 0.2 || true
    done
    [[ ! -s $scratch/ray_current_cluster ]] ||
      { cp "$scratch/ray_current_cluster" "$MEGARL_JOB_DIR/.address" && mv "$MEGARL_JOB_DIR/.address" "$MEGARL_JOB_DIR/address"; }
  fi
  while [[ -z $over ]] && kill -0 "$ray" 2>/dev/null; do
    [[ -z $asked ]] || has_driver || break
    sleep 0.5 || true
  done
  if [[ -n $over$asked ]]; then
    echo "$(date '+%F %T') $SLURMD_NODENAME: Ray is ended${over:+ with the run}${asked:+, after SIGTERM and the driver}"
    exit 0
  fi
  code=0
  wait "$ray" || code=$?
  over=USR1
  said=$(tail -c "+$((log_begin + 1))" "$log" | grep -oE '[a-z_]+ \[exit code=[-0-9]+\]' | tail -n 1) || true
  echo "${said:-code $code}" >"$MEGARL_JOB_DIR/ended-$SLURMD_NODENAME" || true
  echo "$(date '+%F %T') $SLURMD_NODENAME: Ray has ended with code $code"
  exit $((code ? code : 1))
}
main
