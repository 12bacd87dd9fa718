# shellcheck shell=bash disable=SC2016,SC2034,SC2154 # the variables are train.sh's or a step's own
# Sourced by train.sh for what is typed outside of a job: --local, --submit and --attach.

# What a job would do, as text, and what it takes; the exit code is the plan's.
local_job() {
  read_submission "$@"
  compose_job
  echo "This is what the job would do; nothing is started. A look at nodes and configuration, Ray, the run:"
  submission=(sbatch "${options[@]}" slurm/train.sh "${rest[@]}")
  for each in submission check_nodes check_job start_ray start_driver; do
    declare -n words=$each
    printf '   %s\n' "$(printf ' %q' "${words[@]}")"
  done
  echo "environment ($site):"
  env | grep -E '^(MEGARL|RAY|NCCL|HF|FI|CUDA|GLOO|PYTHONPATH|SLURM_(JOB_NUM|GPUS_ON))' | sort | sed 's/^/    /'
  "${doctor[@]}" --job "${what[@]}" | sed 's/^/    /'
  echo "The plan, of which \`megarl plan\` prints all:"
  plan_job
}

# Check the configuration, the plan and the signal's time, then sbatch.
submit_job() {
  local code=0 lead=0 plan signal
  read_submission "$@"
  signal=$(read_option '--signal[ =]')
  [[ ! $signal =~ @([0-9]+)$ ]] || lead=${BASH_REMATCH[1]}
  if ((limit > 0 && 2 * lead > limit)); then
    fail "--signal: found $signal, $lead s before the time limit of $limit s (--time=$time_limit): less than half of it is" \
      "left to train; --time=$(((2 * lead + 59) / 60)) at least, or --signal=B:USR1@SECONDS, at most $((limit / 2))"
  fi
  plan=$(compose_job && "${doctor[@]}" --job "${what[@]}" >/dev/null && plan_job) || code=$?
  sed '/^$/d' <<<"$plan" >&2; ((code == 0)) || exit "$code"
  [[ ! $plan =~ --signal=B:USR1@([0-9]+) ]] || ((lead >= BASH_REMATCH[1])) ||
    fail "--signal: found $signal; the plan asks for ${BASH_REMATCH[0]} (sbatch slurm/train.sh takes any)"
  exec sbatch "${options[@]}" "$MEGARL_HOME/slurm/train.sh" "${rest[@]}"
}

# The end of the job's plan, and its exit code; 0 without a plan.
plan_job() {
  local code=0 said planner=("${inside[@]}" "$MEGARL_PYTHON" -m megarl.plan.command)
  [[ $command == train && " ${arguments[*]}" != *' resume='* ]] || return 0
  ((limit == 0)) || planner+=("--hours=$(awk "BEGIN { print $limit / 3600 }")")
  said=$("${planner[@]}" "${arguments[@]}" 2>&1) || code=$?
  sed -nE 's/^error: (cluster.hardware.gpu: found null).*/none (\1)/
    /^(Total|none|error|does not fit|Module)/,$s/^/    /p' <<<"$said"
  [[ $said =~ gpu:\ found\ null|ModuleNotFoundError ]] || return "$code"
}

# A command (bash) beside a running job's driver: --attach JOBID [COMMAND ...]. Ray's own commands find its Ray.
attach_job() {
  local terminal=()
  (($#)) || fail "--attach: found nothing; slurm/train.sh --attach JOBID [COMMAND ...]"
  (($# > 1)) || set -- "$1" bash
  [[ ! -t 0 ]] || terminal=(--pty)
  exec srun --jobid="$1" --overlap --mpi=none --nodes=1 --ntasks=1 --relative=0 "${terminal[@]}" bash -c '
    ray=/tmp/megarl-ray-$SLURM_JOB_ID-0
    [[ -O $ray && -s $ray/ray_current_cluster ]] && source "$ray/environment" &&
      RAY_ADDRESS=$(<"$ray/ray_current_cluster") exec "$@"
    echo "error: --attach: job $SLURM_JOB_ID has no Ray now" >&2
    exit 2
  ' bash "${@:2}"
}

# The options of sbatch into `options`; what stands behind the script, from the first override on, into `rest`.
read_submission() {
  options=()
  until (($# == 0)) || [[ $1 =~ ^(-m|--multirun|--config-dir=.*|--command=.*|~.*|[^-].*=.*)$ ]]; do
    options+=("$1") && shift
  done
  rest=("$@") num_nodes=$(read_option '--nodes[ =]|-N ?') gpus_per_node=$(read_option '--gpus-per-node[ =]')
  gpus_per_node=${gpus_per_node##*:} time_limit=$(read_option '--time[ =]|-t ?') # h100:8
  limit=$(count_seconds "$time_limit") || fail "--time: found $time_limit; MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS"
  [[ $num_nodes =~ ^[1-9][0-9]*$ && $gpus_per_node =~ ^[0-9]+$ ]] ||
    fail "--local: found --nodes=$num_nodes --gpus-per-node=$gpus_per_node; numbers are needed"
}

# The last value of an option (pattern $1) in `options`, else in the #SBATCH lines.
read_option() {
  local given
  given="$(sed -n 's/^#SBATCH//p' "$MEGARL_HOME/slurm/train.sh" | tr '\n' ' ') ${options[*]}"
  [[ ! $given =~ .*" "($1)([^ ]+) ]] || echo "${BASH_REMATCH[2]}"
}

# The commands of a job that has these nodes.
compose_job() {
  job=JOBID
  export SLURM_JOB_ID=JOBID SLURM_JOB_NUM_NODES=$num_nodes SLURM_GPUS_ON_NODE=$gpus_per_node
  mapfile -t nodes < <(seq -f 'node%g' "$num_nodes")
  read_arguments "${rest[@]}"
  compose
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
