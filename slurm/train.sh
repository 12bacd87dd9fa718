#!/usr/bin/env bash
# sbatch slurm/train.sh algo=vapo model=qwen32b [overrides]     train over the nodes of one job
# sbatch --nodes=2 slurm/train.sh resume=RUN_DIR                resume a run
# slurm/train.sh --local [--nodes=N --gpus-per-node=N] [...]    print what that would do, and do nothing
#
# The run's folder is runs/slurm_JOBID under the directory of sbatch, or hydra.run.dir=DIR. Before the time limit
# (--signal) a checkpoint is written and the job is requeued, as it is when a node is lost; it resumes from there.
# `scancel --signal=USR1 --batch JOBID` asks for that at any time, `scancel JOBID` ends the job. What differs from site
# to site is in slurm/site.sh (or MEGARL_SITE=FILE).
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
TEARDOWN_S=15     # of the steps that hold Ray
MARGIN_S=60       # before the time limit the job is requeued, with or without the checkpoint
SLURM_S=20        # of a word with Slurm's controller
REQUEUE_S=40      # of trying to queue the job again
EXIT_USR1=138

find_home() {
  # sbatch runs a copy of this file, from its spool folder.
  local command
  if [[ -n ${SLURM_JOB_ID:-} && -z ${MEGARL_HOME:-} ]]; then
    command=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\([^ ]*\).*/\1/p')
    MEGARL_HOME=$(dirname "$(dirname "$command")")
    [[ -f $MEGARL_HOME/slurm/node.sh ]] || MEGARL_HOME=${SLURM_SUBMIT_DIR:-}
  fi
  MEGARL_HOME=${MEGARL_HOME:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
  [[ -f $MEGARL_HOME/slurm/node.sh ]] || fail "MEGARL_HOME: found '$MEGARL_HOME', which has no slurm/node.sh; name megarl's directory"
}

read_arguments() {
  local text
  run_dir='' arguments=()
  for text in "$@"; do
    case $text in
      -m | --multirun) fail "$text: a job is one run; a sweep on Slurm is python -m megarl.train -m hydra/launcher=..., from the login node" ;;
      --config-dir=*)
        text=$(realpath -e "${text#*=}") || fail "--config-dir: no such directory"
        arguments+=("--config-dir=$text")
        ;;
      -*) fail "$text: options of sbatch stand before slurm/train.sh, what stands behind it is for megarl.train (--config-dir=DIR, key=value)" ;;
      cluster.ray_address=*) fail "cluster.ray_address: train.sh starts Ray and sets it" ;;
      hydra.run.dir=* | resume=*) run_dir=${text#*=} ;;&
      hydra.run.dir=*) ;;
      *) arguments+=("$text") ;;
    esac
  done
  run_dir=${run_dir#[\'\"]}
  run_dir=${run_dir%[\'\"]}
  [[ $run_dir != *\$\{* ]] || fail "hydra.run.dir: found $run_dir; in a job it is a directory, without \${...}"
  run_dir=$(realpath -m "${run_dir:-runs/slurm_$SLURM_JOB_ID}")
  [[ " ${arguments[*]-} " == *" resume="* ]] || arguments+=("hydra.run.dir='$run_dir'")
  [[ " ${arguments[*]-} " =~ " "(cluster|resume)= ]] || arguments=(cluster=slurm "${arguments[@]}")
  # What a resumed job was given besides stays.
  if ((${SLURM_RESTART_COUNT:-0} > 0)) && [[ -f $run_dir/run.json && " ${arguments[*]} " != *" resume="* ]]; then
    arguments=("resume=$run_dir")
  fi
}

# What the steps have in common, and how a command gets into the container.
build_commands() {
  # A run's own name may have commas, as those of a sweep.
  local mounts
  mounts="$code_dir,$(dirname "$run_dir"),$PWD,/tmp,/dev/shm${MEGARL_MOUNTS:+,$MEGARL_MOUNTS}"
  step=(srun --overlap --cpu-bind=none --export=ALL)
  # Outside of the container, which may take minutes to unpack.
  touch_nodes=("${step[@]}" --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" true)
  inside=()
  case $MEGARL_CONTAINER in
    none) ;;
    pyxis) step+=(--container-image="$MEGARL_IMAGE" --container-mounts="$(pair_mounts "$mounts")" --container-workdir="$PWD") ;;
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
  check_job=("${on_head[@]}" "${inside[@]}" "$MEGARL_PYTHON" -m megarl.doctor.preflight job "${arguments[@]}")
  check_nodes=("${on_all[@]}" "${inside[@]}" "$MEGARL_PYTHON" -m megarl.doctor.preflight node "${arguments[@]}")
  compare_nodes=("${on_head[@]}" "${inside[@]}" "$MEGARL_PYTHON" -m megarl.doctor.preflight compare "${arguments[@]}")
  start_head=("${on_head[@]}" "${ray[@]}" "${inside[@]}" bash "$MEGARL_HOME/slurm/node.sh")
  start_others=("${on_others[@]}" "${ray[@]}" "${inside[@]}" bash "$MEGARL_HOME/slurm/node.sh")
  start_driver=("${on_head[@]}" --job-name=driver "${inside[@]}" env "MEGARL_MARK=$driver_mark" "$MEGARL_PYTHON" -m "${MEGARL_MODULE:-megarl.train}" "${arguments[@]}")
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
  local settings line
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
      say "Ray has ended on a node, see $run_dir/logs/slurm; the driver has $patience s to end"
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

# Seconds since 1970 at which a job that was asked to stop must be requeued; far off where Slurm does not answer.
find_time_limit() {
  local end
  end=$(timeout "$SLURM_S" scontrol show job "$SLURM_JOB_ID" | sed -n 's/.* EndTime=\([^ ]*\).*/\1/p') || true
  end=$(date -d "${end:-Unknown}" +%s 2>/dev/null) || end=$(($(date +%s) + 10 * 365 * 86400))
  echo $((end - MARGIN_S))
}

# Send signal $2 to the job's steps of the name $1; false where there is none. Not to srun: that ends a step by force.
signal_steps() {
  local steps
  mapfile -t steps < <(timeout "$SLURM_S" squeue --steps --noheader --jobs="$SLURM_JOB_ID" --format='%i %j' | awk -v name="$1" '$2 == name { print $1 }')
  ((${#steps[@]})) || return 1
  # Slurm 22.05 delivers the signal and yet says that there is no such job.
  timeout "$SLURM_S" scancel --signal="$2" "${steps[@]}" 2>/dev/null || true
}

# What the job was asked to do, to the driver, once there is one.
forward() {
  if [[ -n $stop && $forwarded != "$stop" ]] && signal_steps driver "$stop"; then
    forwarded=$stop
  fi
}

# How the job ends: it is requeued after USR1, or where a node is lost; else the driver's code counts.
end() {
  local code=${1:-$EXIT_USR1}
  tear_down
  if [[ $stop == TERM ]]; then
    say "ended by Slurm: scancel, the time limit, or a node that was lost"
    exit 143
  elif [[ $stop == USR1 && ($code == "$EXIT_USR1" || $code == 137) ]]; then
    expect_progress
    requeue "SIGUSR1"
  elif ((code != 0 && code != 2)) && ! timeout 60 "${touch_nodes[@]}" 2>/dev/null; then
    requeue "a node does not answer"
  fi
  exit "$code"
}

# A start that used most of its time and wrote no checkpoint is not repeated: the next would do the same.
expect_progress() {
  local now newest
  now=$(date +%s) newest=$(read_newest)
  [[ $newest == "$begun_from" ]] && ((now - begun_at > $(find_time_limit) - now)) || return 0
  say "SIGUSR1: not requeued: this start's time is over, and in $((now - begun_at)) s it wrote no checkpoint (newest:" \
    "${newest:-none}). Give it more (sbatch --time=, --signal=B:USR1@SECONDS), or make iterations shorter" \
    "(checkpoint.save_every=1)${newest:+; to resume: $(tell_again)}"
  exit "$EXIT_USR1"
}

# The newest checkpoints, of training and of value pretraining.
read_newest() { (cd "$run_dir" && grep -s '' {checkpoints,value_pretraining}/latest | sed 's,/latest:,/,' | xargs) || true; }

# Value pretraining on its own is resumed in its folder by the command that it was started with.
tell_again() {
  if [[ -f $run_dir/run.json ]]; then echo "sbatch slurm/train.sh resume=$run_dir"; else echo "the same again, hydra.run.dir=$run_dir"; fi
}

requeue() {
  say "$1: requeued; it resumes from the newest checkpoint in $run_dir"
  stop=''
  # Slurm ends this start of the job, scontrol included.
  if wait_until "$REQUEUE_S" ask_for_requeue; then
    wait_until 60 is_ended_by_slurm && exit "$EXIT_USR1"
  fi
  say "Slurm does not requeue the job; by hand: $(tell_again)"
  exit "$EXIT_USR1"
}

# The controller may not answer at once.
ask_for_requeue() { timeout "$SLURM_S" scontrol requeue "$SLURM_JOB_ID" || { nap && nap && is_ended_by_slurm; }; }

is_ended_by_slurm() { [[ $stop == TERM ]]; }

tear_down() {
  if ! have_ended "$head" "$others"; then
    signal_steps ray TERM || true
    wait_until "$TEARDOWN_S" have_ended "$head" "$others" || {
      say "Ray's steps did not end within $TEARDOWN_S s; killed"
      signal_steps ray KILL || true
    }
  fi
  kill_marked "$driver_mark"
  rm -rf "$job_dir"
  rmdir --ignore-fail-on-non-empty "$run_dir/.slurm" || true
  remove_left_over
}

have_ended() { ! is_running "$1" && ! is_running "$2"; }

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
  MEGARL_NODES=$(IFS=,; echo "${nodes[*]}")
  # Ray's processes keep their environment, by which they are found at the end (setproctitle would overwrite it).
  export SPT_NOENV=1
  export MEGARL_NODES RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$MEGARL_JOB_DIR/token
  # Where the package megarl is: in a checkout, or this folder is in an installed package itself.
  code_dir=$MEGARL_HOME
  [[ ! -f $MEGARL_HOME/__init__.py ]] || code_dir=$(dirname "$MEGARL_HOME")
  export PYTHONPATH=$code_dir${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
}

load_site() {
  site=${MEGARL_SITE:-$MEGARL_HOME/slurm/site.sh}
  [[ -f $site ]] || fail "MEGARL_SITE: no such file: $site"
  # shellcheck source=slurm/site.sh
  source "$site"
  # shellcheck source=slurm/clean.sh
  source "$MEGARL_HOME/slurm/clean.sh"
}

find_home
if [[ ${1:-} == --local ]]; then
  # shellcheck source=slurm/local.sh
  source "$MEGARL_HOME/slurm/local.sh"
  show_local "${@:2}"
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
begun_at=$(date +%s) begun_from=$(read_newest)
say "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on ${nodes[*]}: megarl.train ${arguments[*]}"
check
[[ -z $stop ]] || end
start_ray
[[ -z $stop ]] || end
run_driver
end "$code"
