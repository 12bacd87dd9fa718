# shellcheck shell=bash disable=SC2154 # the variables are train.sh's
# Sourced by train.sh for what is typed outside of a job: --local, --submit and --attach.

# What a job would do, as text.
local_job() {
  read_submission "$@"
  compose_job
  echo "This is what the job would do; nothing is started."
  echo
  print_command sbatch "${options[@]}" slurm/train.sh "${rest[@]}"
  sed -n 's/^#SBATCH/   /p' "$MEGARL_HOME/slurm/train.sh"
  echo
  echo "1. The configuration against the allocation, and every node: its GPUs and model.path."
  print_command "${check_job[@]}"
  print_command "${check_nodes[@]}"
  print_command "${compare_nodes[@]}"
  echo "2. Ray, first on ${nodes[0]}, which writes its address to $MEGARL_JOB_DIR/address."
  print_command "${start_head[@]}"
  if ((num_nodes > 1)); then print_command "${start_others[@]}"; fi
  echo "3. The run; SIGUSR1 is passed on to it, and it is requeued after the checkpoint."
  print_command "${start_driver[@]}" cluster.ray_address=HOST:PORT
  echo
  echo "environment ($site):"
  env | grep -E '^(MEGARL|RAY|NCCL|HF|FI|CUDA|GLOO|PYTHONPATH|SLURM_(JOB_NUM|GPUS_ON))' | sort | sed 's/^/    /'
  echo
  check_composed
}

# Check the configuration and the signal's time, then sbatch.
submit_job() {
  local lead limit
  read_submission "$@"
  lead=${signal##*@}
  limit=$(count_seconds "$time_limit") || fail "--time: found $time_limit; MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS"
  [[ $lead =~ ^[0-9]+$ ]] || lead=0
  if ((limit > 0 && 2 * lead > limit)); then
    fail "--signal: found $signal, $lead s before the time limit of $limit s (--time=$time_limit): less than half of it is" \
      "left to train; --time=$(((2 * lead + 59) / 60)) at least, or --signal=B:USR1@SECONDS, at most $((limit / 2))"
  fi
  (compose_job && check_composed) >/dev/null
  exec sbatch "${options[@]}" "$MEGARL_HOME/slurm/train.sh" "${rest[@]}"
}

# A command (bash) beside a running job's driver: --attach JOBID [COMMAND ...]. Ray's own commands find its Ray.
attach_job() {
  local id=${1:-} head terminal=() words=("${@:2}")
  [[ -n $id ]] || fail "--attach: found nothing; slurm/train.sh --attach JOBID [COMMAND ...]"
  head=$(scontrol show job "$id" 2>/dev/null | sed -n 's/^ *BatchHost=//p' | head -n 1) || true
  [[ -n $head ]] || fail "--attach: found $id, which is no running job"
  ((${#words[@]})) || words=(bash)
  [[ ! -t 0 ]] || terminal=(--pty)
  # shellcheck disable=SC2016 # the step's own variables
  exec srun --jobid="$id" --overlap --mpi=none --nodes=1 --ntasks=1 --nodelist="$head" "${terminal[@]}" bash -c '
    for file in /proc/[0-9]*/environ; do
      grep -qzxF "MEGARL_MARK=driver-$SLURM_JOB_ID" "$file" 2>/dev/null || continue
      while IFS= read -rd "" each; do
        case $each in MEGARL_* | RAY_* | PATH=* | PYTHONPATH=*) [[ $each == MEGARL_MARK=* ]] || export "$each" ;; esac
      done <"$file"
      export RAY_ADDRESS=$MEGARL_RAY_ADDRESS
      exec "$@"
    done
    echo "error: --attach: job $SLURM_JOB_ID has no driver now" >&2
    exit 2
  ' bash "${words[@]}"
}

# The options of sbatch into `options`, what stands behind the script into `rest`.
read_submission() {
  local text option=''
  num_nodes=$(read_default nodes) gpus_per_node=$(read_default gpus-per-node) options=() rest=()
  time_limit='' signal=$(read_default signal)
  for text in "$@"; do
    case $text in
      -m | --multirun | --config-dir=* | --command=*) rest+=("$text") && continue ;;
      -[Nt][0-9]*) option=${text:0:2} options+=("$text") text=${text:2} ;;
      -[Nt]) option=$text options+=("$text") && continue ;;
      --*=*) option=${text%%=*} options+=("$text") text=${text#*=} ;;
      -*) option=$text options+=("$text") && continue ;;
      # An override has an =; a word without one is the value of the option before it.
      *=* | '~'*) option='' rest+=("$text") && continue ;;
      *) if [[ -n $option ]]; then options+=("$text"); else rest+=("$text"); fi ;;
    esac
    case $option in
      --nodes | -N) num_nodes=$text ;;
      --gpus-per-node) gpus_per_node=${text##*:} ;; # h100:8
      --time | -t) time_limit=$text ;;
      --signal) signal=$text ;;
    esac
    option=''
  done
  [[ $num_nodes =~ ^[1-9][0-9]*$ && $gpus_per_node =~ ^[0-9]+$ ]] ||
    fail "--local: found --nodes=$num_nodes --gpus-per-node=$gpus_per_node; numbers are needed"
}

# The commands of a job that has these nodes.
compose_job() {
  job=JOBID
  export SLURM_JOB_ID=JOBID SLURM_JOB_NUM_NODES=$num_nodes SLURM_GPUS_ON_NODE=$gpus_per_node
  mapfile -t nodes < <(seq -f 'node%g' "$num_nodes")
  load_site
  read_arguments "${rest[@]}"
  set_environment
  build_commands
}

check_composed() {
  "$MEGARL_PYTHON" -m megarl.plan.doctor --job "--command=$command" "${arguments[@]}" | sed 's/^/    /'
}

# Seconds of a time as sbatch takes it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S; 0 where there is none.
count_seconds() {
  local days hours minutes seconds
  [[ -n $1 && $1 != UNLIMITED && $1 != infinite ]] || { echo 0 && return; }
  [[ $1 =~ ^(([0-9]+)-)?([0-9]+)(:([0-9]+))?(:([0-9]+))?$ ]] || return 1
  days=${BASH_REMATCH[2]:-0} hours=${BASH_REMATCH[3]} minutes=${BASH_REMATCH[5]:-0} seconds=${BASH_REMATCH[7]:-0}
  # One or two numbers without days begin with the minutes.
  [[ $1 == *-* || -n ${BASH_REMATCH[7]} ]] || { seconds=$minutes minutes=$hours hours=0; }
  echo $((10#$days * 86400 + 10#$hours * 3600 + 10#$minutes * 60 + 10#$seconds))
}

read_default() { sed -n "s/^#SBATCH --$1=//p" "$MEGARL_HOME/slurm/train.sh"; }

print_command() {
  printf '   '
  printf ' %q' "$@"
  echo
}
