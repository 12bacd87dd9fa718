#!/usr/bin/env bash
# sbatch --signal=B:USR1@3000 slurm/train.sh algo=vapo model=qwen32b [overrides]   train over the nodes of one job; how
#                                                               early the signal must come megarl.tools.plan says
# sbatch --nodes=2 slurm/train.sh resume=RUN_DIR                resume a run
# sbatch slurm/train.sh --command=evaluate model=... data=...   another command: train or evaluate
# slurm/train.sh --submit [--nodes=N ...] [...]                 check that first, then sbatch
# slurm/train.sh --local [--nodes=N --gpus-per-node=N] [...]    print what that would do, and do nothing
# slurm/train.sh --attach JOBID [COMMAND ...]                   a shell beside a running job's driver, in its Ray
#
# The run's folder is runs/slurm_JOBID (ARRAYJOB_TASK) under the directory of sbatch, or hydra.run.dir=DIR. Before the
# time limit (--signal) a checkpoint is written and the job is requeued, as it is when a node is lost; it resumes from
# there (restart.sh). `scancel --signal=USR1 --batch JOBID` asks for that at any time, `scancel JOBID` ends the job. What
# differs from site to site is in slurm/site.sh (or MEGARL_SITE=FILE).
#
#SBATCH --job-name=megarl
#SBATCH --nodes=8
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
# shellcheck disable=SC2329 # wait_until calls functions by their names
set -euo pipefail

say() { echo "$(date '+%F %T') $*"; }
fail() { echo "error: $*" >&2; exit 2; }

PREFLIGHT_S=${MEGARL_PREFLIGHT_S:-300} # of a step that looks at the nodes; the first fetches the container
HEAD_S=${MEGARL_HEAD_S:-300}           # until the first node's Ray answers; it may have a container to unpack
WITHOUT_NODES_S=60 # the driver may take to end, after a node's Ray has
TEARDOWN_S=15      # of the steps that hold Ray
EXIT_USR1=138
COMMANDS='train evaluate'

find_home() {
  # sbatch runs a copy of this file, from its spool folder.
  local script
  # A task of an array by its own name: that of the last one's id is the whole array's.
  job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
  job=${job:-${SLURM_JOB_ID:-}}
  if [[ -n $job && -z ${MEGARL_HOME:-} ]]; then
    script=$(scontrol show job "$job" | sed -n 's,^ *Command=\(.*/slurm/train\.sh\).*,\1,p')
    MEGARL_HOME=$(dirname "$(dirname "$script")")
    [[ -f $MEGARL_HOME/slurm/node.sh ]] || MEGARL_HOME=${SLURM_SUBMIT_DIR:-}
  fi
  MEGARL_HOME=${MEGARL_HOME:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
  [[ -f $MEGARL_HOME/slurm/node.sh ]] || fail "MEGARL_HOME: found '$MEGARL_HOME', which has no slurm/node.sh; name megarl's directory"
}

read_arguments() {
  local text
  run_dir='' arguments=() command=train
  for text in "$@"; do
    case $text in
      -m | --multirun) fail "$text: a job is one run; a sweep on Slurm is python -m megarl.train -m hydra/launcher=..., from the login node" ;;
      --command=*)
        command=${text#*=}
        [[ " $COMMANDS " == *" $command "* ]] || fail "--command: found '$command'; one of ${COMMANDS// /, }"
        ;;
      --config-dir=*)
        text=$(realpath -e "${text#*=}") || fail "--config-dir: no such directory"
        arguments+=("--config-dir=$text")
        ;;
      -*) fail "$text: options of sbatch stand before slurm/train.sh, what stands behind it is for megarl.train (--config-dir=DIR, key=value) or --command=NAME" ;;
      cluster.ray_address=*) fail "cluster.ray_address: train.sh starts Ray and sets it" ;;
      hydra.run.dir=* | resume=*) run_dir=${text#*=} ;;&
      hydra.run.dir=*) ;;
      *) arguments+=("$text") ;;
    esac
  done
  run_dir=${run_dir#[\'\"]}
  run_dir=${run_dir%[\'\"]}
  [[ $run_dir != *\$\{* ]] || fail "hydra.run.dir: found $run_dir; in a job it is a directory, without \${...}"
  [[ $command == train || " ${arguments[*]-} " != *" resume="* ]] || fail "resume: found with --command=$command; it is for training"
  run_dir=$(realpath -m "${run_dir:-runs/slurm_$job}")
  [[ " ${arguments[*]-} " == *" resume="* ]] || arguments+=("hydra.run.dir='$run_dir'")
  [[ " ${arguments[*]-} " =~ " "(cluster|resume)= ]] || arguments=(cluster=slurm "${arguments[@]}")
  # What a resumed job was given besides stays.
  if ((${SLURM_RESTART_COUNT:-0} > 0)) && [[ -f $run_dir/run.json && " ${arguments[*]} " != *" resume="* ]]; then
    arguments=("resume=$run_dir")
  fi
}

is_running() { [[ -n ${1:-} ]] && kill -0 "$1" 2>/dev/null; }

# A second, or less where a signal comes.
nap() {
  sleep 1 &
  wait $! || true
}

# A step of the preflight.
look() {
  local code=0
  timeout "$PREFLIGHT_S" "$@" || code=$?
  ((code != 124)) || echo "error: a step of the preflight did not end within $PREFLIGHT_S s (MEGARL_PREFLIGHT_S): $*" >&2
  return "$code"
}

check() {
  local settings line said
  said=$(look "${touch_nodes[@]}") || { say "srun starts no step on every node"; end 1; }
  order_nodes "$said"
  name_nodes
  build_commands
  settings=$(look "${check_job[@]}") || end $?
  while read -r line; do
    # A container may print a banner.
    if [[ $line =~ ^MEGARL_[A-Z_]+=[0-9]+$ ]]; then export "${line?}"; fi
  done <<<"$settings"
  look "${check_nodes[@]}" >"$job_dir/nodes" || end $?
  look "${compare_nodes[@]}" <"$job_dir/nodes" || end $?
}

start_ray() {
  local deadline=$((SECONDS + HEAD_S))
  "${start_head[@]}" &
  head=$!
  until [[ -s $job_dir/address || -n $stop ]]; do
    is_running "$head" || { say "Ray ended on ${nodes[0]}: $run_dir/logs/slurm/node-${nodes[0]}.log"; end 1; }
    ((SECONDS < deadline)) || { say "Ray on ${nodes[0]} gave no address within $HEAD_S s: $run_dir/logs/slurm"; end 1; }
    nap
  done
  [[ -z $stop ]] || end
  MEGARL_RAY_ADDRESS=$(<"$job_dir/address")
  export MEGARL_RAY_ADDRESS
  if ((${#nodes[@]} > 1)); then
    "${start_others[@]}" &
    others=$!
  fi
  say "Ray at $MEGARL_RAY_ADDRESS on ${nodes[*]}"
}

# Whether every node's Ray is there.
has_nodes() { is_running "$head" && { ((${#nodes[@]} == 1)) || is_running "$others"; }; }

run_driver() {
  local lost='' patience=$WITHOUT_NODES_S limit=''
  "${start_driver[@]}" "cluster.ray_address=$MEGARL_RAY_ADDRESS" &
  driver=$!
  while is_running "$driver"; do
    nap
    forward
    [[ $stop != TERM ]] || patience=5
    [[ $stop != USR1 || -n $limit ]] || limit=$(find_time_limit)
    if [[ -z $lost ]] && ! has_nodes; then
      lost=$SECONDS
      say "Ray has ended$(describe_lost), see $run_dir/logs/slurm; the driver has $patience s to end"
    fi
    if [[ -n $lost ]] && ((SECONDS - lost > patience)) || { [[ -n $limit ]] && (($(date +%s) > limit)); }; then
      say "the driver has not ended in time"
      kill_marked "$driver_mark" # on this machine; of a job that ends Slurm signals no step
      nap
      kill -KILL "$driver" 2>/dev/null || true
    fi
  done
  code=0
  wait "$driver" || code=$?
  say "the driver has ended with code $code"
}

# What the job was asked to do, to the driver, once there is one.
forward() {
  if [[ -n $stop && $forwarded != "$stop" ]] && signal_steps driver "$stop"; then
    forwarded=$stop
  fi
}

make_job_dir() {
  # Each job's own: another may be at work in the run's folder, which the run itself then refuses.
  job_dir=$MEGARL_JOB_DIR
  mkdir -p "$run_dir/logs/slurm"
  rm -rf "$job_dir"
  mkdir -p "$run_dir/.slurm"
  mkdir -m 700 "$job_dir"
  # Whoever has the token can run code in this Ray, which listens on the network.
  (umask 077; od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$job_dir/token")
}

set_environment() {
  export MEGARL_HOME MEGARL_PYTHON MEGARL_INTERFACE MEGARL_JOB_DIR=$run_dir/.slurm/$SLURM_JOB_ID MEGARL_LOG_DIR=$run_dir/logs/slurm
  name_nodes
  # Ray's processes keep their environment, by which they are found at the end (setproctitle would overwrite it).
  export SPT_NOENV=1
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$MEGARL_JOB_DIR/token
  # Where the package megarl is: in a checkout, or this folder is in an installed package itself.
  code_dir=$MEGARL_HOME
  [[ ! -f $MEGARL_HOME/__init__.py ]] || code_dir=$(dirname "$MEGARL_HOME")
  export PYTHONPATH=$code_dir${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
}

name_nodes() { MEGARL_NODES=$(IFS=,; echo "${nodes[*]}") && export MEGARL_NODES; }

load_site() {
  site=${MEGARL_SITE:-$MEGARL_HOME/slurm/site.sh}
  [[ -f $site ]] || fail "MEGARL_SITE: no such file: $site"
  # shellcheck source=slurm/site.sh
  source "$site"
  # shellcheck source=slurm/clean.sh
  source "$MEGARL_HOME/slurm/clean.sh"
  # shellcheck source=slurm/steps.sh
  source "$MEGARL_HOME/slurm/steps.sh"
  # shellcheck source=slurm/restart.sh
  source "$MEGARL_HOME/slurm/restart.sh"
}

find_home
if [[ ${1:-} == --local || ${1:-} == --submit || ${1:-} == --attach ]]; then
  # shellcheck source=slurm/local.sh
  source "$MEGARL_HOME/slurm/local.sh"
  "${1#--}_job" "${@:2}"
  exit
fi
[[ -n ${SLURM_JOB_ID:-} ]] || fail "SLURM_JOB_ID: not set; sbatch slurm/train.sh ... starts a job, slurm/train.sh --local ... prints what it would do"
stop='' forwarded='' head='' others='' driver=''
trap 'stop=${stop:-USR1}' USR1
trap 'stop=TERM' TERM
load_site
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
read_arguments "$@"
set_environment
build_commands
make_job_dir
say "job $job, start $((${SLURM_RESTART_COUNT:-0} + 1)), on ${nodes[*]}: megarl.$command ${arguments[*]}"
count_start
check
[[ -z $stop ]] || end
start_ray
[[ -z $stop ]] || end
run_driver
end "$code"
