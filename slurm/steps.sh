# shellcheck shell=bash disable=SC2154,SC2034 # the variables are train.sh's
# Sourced by train.sh: the job's steps, as commands, and the signals for them.

SLURM_S=20 # of a word with Slurm's controller

# How every step is started. Steps are single processes that do not speak MPI, whose plugin may be missing.
# Outside of the container, which may take minutes to unpack, each node says where it is in the network.
build_steps() {
  step=(srun --overlap --mpi=none --cpu-bind=none --export=ALL)
  # shellcheck disable=SC2016 # the node's values
  touch_nodes=("${step[@]}" --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}"
    bash -c 'echo "MEGARL_NODE $SLURMD_NODENAME ${SLURM_TOPOLOGY_ADDR:-}"')
}

# Nodes of one switch are neighbours, those of the first node's come first: ranks are placed in this order.
# $1: the lines of touch_nodes.
order_nodes() {
  mapfile -t nodes < <(printf '%s\n' "${nodes[@]}" | awk -v said="$1" '
    BEGIN {
      n = split(said, lines, "\n")
      for (i = 1; i <= n; i++) if (split(lines[i], word, " ") == 3 && word[1] == "MEGARL_NODE") {
        sub(/[^.]*$/, "", word[3])
        switch_of[word[2]] = word[3]
      }
    }
    NR == 1 { first = switch_of[$1] }
    {
      near = 0
      while (near < length(first) && substr(first, near + 1, 1) == substr(switch_of[$1], near + 1, 1)) near++
      printf "%d %d %s %d %s\n", (NR > 1), length(first) - near, "/" switch_of[$1], NR, $1
    }' | sort -k1,1n -k2,2n -k3,3 -k4,4n | awk '{ print $NF }')
}

# How commands get into the container, and the commands.
build_commands() {
  # A run's own name may have commas, as those of a sweep.
  local mounts
  build_steps
  mounts="$code_dir,$(dirname "$run_dir"),$PWD,/tmp,/dev/shm${MEGARL_MOUNTS:+,$MEGARL_MOUNTS}"
  inside=()
  case $MEGARL_CONTAINER in
    none) ;;
    pyxis)
      step+=(--container-image="$MEGARL_IMAGE" --container-mounts="$(pair_mounts "$mounts")" --container-workdir="$PWD")
      # The first step unpacks it, the others find it.
      [[ -z ${MEGARL_KEEP_CONTAINER:-} ]] || step+=(--container-name="megarl-$SLURM_JOB_ID")
      ;;
    apptainer) inside=(apptainer exec --nv --pwd "$PWD" --bind "$mounts" "$MEGARL_IMAGE") ;;
    *) fail "MEGARL_CONTAINER: found $MEGARL_CONTAINER; none, pyxis or apptainer ($site)" ;;
  esac
  [[ $MEGARL_CONTAINER == none || -n $MEGARL_IMAGE ]] || fail "MEGARL_IMAGE: empty, with MEGARL_CONTAINER=$MEGARL_CONTAINER ($site)"
  driver_mark=driver-$SLURM_JOB_ID
  on_head=("${step[@]}" --nodes=1 --ntasks=1 --nodelist="${nodes[0]}")
  on_all=("${step[@]}" --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}")
  on_others=("${step[@]}" --nodes=$((${#nodes[@]} - 1)) --ntasks=$((${#nodes[@]} - 1))
    --nodelist="$(IFS=,; echo "${nodes[*]:1}")")
  # One node's Ray that ends ends all.
  ray=(--job-name=ray --kill-on-bad-exit=1)
  check_job=("${on_head[@]}" "${inside[@]}" "$MEGARL_PYTHON" -m megarl.plan.preflight job "--command=$command" "${arguments[@]}")
  check_nodes=("${on_all[@]}" "${inside[@]}" "$MEGARL_PYTHON" -m megarl.plan.preflight node "--command=$command" "${arguments[@]}")
  compare_nodes=("${on_head[@]}" "${inside[@]}" "$MEGARL_PYTHON" -m megarl.plan.preflight compare "--command=$command" "${arguments[@]}")
  start_head=("${on_head[@]}" "${ray[@]}" "${inside[@]}" bash "$MEGARL_HOME/slurm/node.sh")
  start_others=("${on_others[@]}" "${ray[@]}" "${inside[@]}" bash "$MEGARL_HOME/slurm/node.sh")
  start_driver=("${on_head[@]}" --job-name=driver "${inside[@]}" env "MEGARL_MARK=$driver_mark" "$MEGARL_PYTHON" -m "megarl.$command" "${arguments[@]}")
}

# A,B:C -> A:A,B:C, as pyxis wants them.
pair_mounts() {
  local each result=()
  IFS=, read -ra each <<<"$1"
  for path in "${each[@]}"; do
    [[ $path == *:* ]] && result+=("$path") || result+=("$path:$path")
  done
  (IFS=,; echo "${result[*]}")
}

# Send signal $2 to the job's steps of the name $1; false where there is none. Not to srun: that ends a step by force.
signal_steps() {
  local steps
  mapfile -t steps < <(timeout "$SLURM_S" squeue --steps --noheader --jobs="$job" --format='%i %j' | awk -v name="$1" '$2 == name { print $1 }')
  ((${#steps[@]})) || return 1
  # Slurm 22.05 delivers the signal and yet says that there is no such job.
  timeout "$SLURM_S" scancel --signal="$2" "${steps[@]}" 2>/dev/null || true
}
