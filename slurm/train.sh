#!/usr/bin/env bash
# sbatch --signal=B:USR1@3000 slurm/train.sh [--command=evaluate] [--config-dir=DIR] algo=vapo model=qwen32b [OVERRIDES]
# slurm/train.sh --local|--submit [OPTIONS OF SBATCH] OVERRIDES   print what the job would do | check its plan, then sbatch
# slurm/train.sh --attach JOBID [COMMAND]   a shell, or COMMAND, in a running job. Sites: slurm/site.sh; all: docs/slurm.md
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
# shellcheck disable=SC2016,SC2329 # steps have values of their own; wait_until calls functions by their names
set -euo pipefail

fail() { echo "error: $*" >&2; exit 2; }
say() {
  echo "$(date '+%F %T') $*"
  [[ ! -f $run_dir/train.log ]] || echo "$(date '+%F %T') job $job: $*" >>"$run_dir/train.log" || true
}

PREFLIGHT_S=${MEGARL_PREFLIGHT_S:-300} # of a step that looks at the nodes; the first fetches the container
HEAD_S=${MEGARL_HEAD_S:-300}           # until the first node's Ray answers; it may have a container to unpack
WITHOUT_NODES_S=60 # the driver may take to end, after a node's Ray has
TEARDOWN_S=15      # of the step that holds Ray
SLURM_S=20         # of a word with Slurm's controller
MARGIN_S=60        # before the time limit the job is requeued, with or without the checkpoint
NOTICE_S=15        # after the driver has ended, until Ray is known to have ended before it
REQUEUE_S=60       # of trying to queue the job again
# The job is queued again after SIGUSR1, after a preemption, and where a node, its Ray or the driver was lost; it goes
# on from the newest checkpoint. A start that brought no new checkpoint is repeated at most so often, whatever ended it.
MAX_REPEATS=2
EXIT_USR1=138

read_arguments() {
  local text resume=''
  run_dir='' arguments=() command=train
  for text in "$@"; do
    case $text in
      -m | --multirun) fail "$text: a job is one run; a sweep is megarl train -m hydra/launcher=slurm, no job" ;;
      --command=train | --command=evaluate) command=${text#*=} ;;
      --command=*) fail "--command: found '${text#*=}'; one of train, evaluate" ;;
      --config-dir=*)
        text=$(realpath -e "${text#*=}") || fail "--config-dir: no such directory"
        arguments+=("--config-dir=$text")
        ;;
      -*) fail "$text: options of sbatch stand before slurm/train.sh, what stands behind it is for megarl.train (--config-dir=DIR, key=value) or --command=NAME" ;;
      cluster.ray_address=*) fail "cluster.ray_address: train.sh starts Ray and sets it" ;;
      hydra.run.dir=*) run_dir=${text#*=} ;;
      resume=*) resume=${text#*=} arguments+=("$text") ;;
      *) arguments+=("$text") ;;
    esac
  done
  run_dir=${resume:-${run_dir:-runs/slurm_$job}}
  run_dir=${run_dir#[\'\"]}
  [[ $run_dir != *\$\{* ]] || fail "hydra.run.dir: found $run_dir; in a job it is a directory, without \${...}"
  run_dir=$(realpath -m "${run_dir%[\'\"]}")
  again="sbatch slurm/train.sh resume=$run_dir (if it has no run.json: the same again, hydra.run.dir=$run_dir)"
  [[ $command == train || -z $resume ]] || fail "resume: found with --command=$command; it is for training"
  [[ -n $resume ]] || arguments+=("hydra.run.dir='$run_dir'")
  [[ -n $resume || " ${arguments[*]}" == *" cluster="* ]] || arguments=(cluster=slurm "${arguments[@]}")
  # What a resumed job was given besides stays.
  if ((${SLURM_RESTART_COUNT:-0} > 0)) && [[ -f $run_dir/run.json && -z $resume ]]; then
    arguments=("resume=$run_dir")
  fi
}

# The environment of the job's steps, and their commands.
compose() {
  local mounts on_all
  site=${MEGARL_SITE:-$MEGARL_HOME/slurm/site.sh}
  [[ -f $site ]] || fail "MEGARL_SITE: no such file: $site"
  # shellcheck source=slurm/site.sh
  source "$site"
  # Each job's folder is its own: another may be at work in the run's, which the run itself then refuses.
  export MEGARL_HOME MEGARL_PYTHON MEGARL_INTERFACE
  export MEGARL_JOB_DIR=$run_dir/.slurm/$SLURM_JOB_ID MEGARL_LOG_DIR=$run_dir/logs/slurm
  # Ray's processes keep their environment, by which they are found at the end (setproctitle would overwrite it).
  export SPT_NOENV=1 RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$MEGARL_JOB_DIR/token
  # Where the package megarl is: in a checkout, or this folder is in an installed package itself.
  code_dir=$MEGARL_HOME
  [[ ! -f $MEGARL_HOME/__init__.py ]] || code_dir=$(dirname "$MEGARL_HOME")
  export PYTHONPATH=$code_dir${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

  # Steps are single processes that do not speak MPI, whose plugin may be missing.
  step=(srun --overlap --mpi=none --cpu-bind=none --export=ALL)
  on_all=(--nodes="${#nodes[@]}" --ntasks="${#nodes[@]}")
  # Outside of the container, which may take minutes to unpack, each node says at which switch it is.
  touch_nodes=("${step[@]}" "${on_all[@]}"
    bash -c 'echo "MEGARL_NODE ${SLURM_TOPOLOGY_ADDR%"$SLURMD_NODENAME"}. $SLURM_PROCID $SLURMD_NODENAME"')
  # The run's parent: its own name may have commas, as those of a sweep.
  mounts="$code_dir,$(dirname "$run_dir"),$PWD,/tmp,/dev/shm${MEGARL_MOUNTS:+,$MEGARL_MOUNTS}"
  inside=()
  case $MEGARL_CONTAINER in
    none) ;;
    pyxis)
      # It wants A:A for A.
      mounts=$(tr , '\n' <<<"$mounts" | sed '/:/!s/.*/&:&/' | paste -sd,)
      step+=(--container-image="$MEGARL_IMAGE" --container-mounts="$mounts" --container-workdir="$PWD")
      # The first step unpacks it, the others find it.
      [[ -z ${MEGARL_KEEP_CONTAINER:-} ]] || step+=(--container-name="megarl-$SLURM_JOB_ID")
      ;;
    apptainer) inside=(apptainer exec --nv --pwd "$PWD" --bind "$mounts" "$MEGARL_IMAGE") ;;
    *) fail "MEGARL_CONTAINER: found $MEGARL_CONTAINER; none, pyxis or apptainer ($site)" ;;
  esac
  [[ $MEGARL_CONTAINER == none || -n $MEGARL_IMAGE ]] || fail "MEGARL_IMAGE: empty, with MEGARL_CONTAINER=$MEGARL_CONTAINER ($site)"
  on_head=("${step[@]}" --nodes=1 --ntasks=1 --nodelist="${nodes[0]}")
  doctor=("${inside[@]}" "$MEGARL_PYTHON" -m megarl.plan.doctor) what=("--command=$command" "${arguments[@]}")
  check_nodes=("${step[@]}" "${on_all[@]}" "${doctor[@]}" --node "${what[@]}")
  check_job=("${on_head[@]}" "${doctor[@]}" --job "${what[@]}")
  start_ray=("${step[@]}" "${on_all[@]}" --job-name=ray --kill-on-bad-exit=0 --wait=0
    "${inside[@]}" bash "$MEGARL_HOME/slurm/node.sh")
  # Signalled and killed by its process ids: srun would end it by force, and of a job that ends Slurm signals no step.
  start_driver=("${on_head[@]}" --job-name=driver "${inside[@]}"
    bash -c 'echo $$ >"$MEGARL_JOB_DIR/driver" && MEGARL_MARK=driver-$SLURM_JOB_ID exec "$@"' bash
    "$MEGARL_PYTHON" -m megarl.${command/#evaluate/cli evaluate} "${arguments[@]}")
}

look() {
  local code=0
  timeout "$PREFLIGHT_S" "$@" || code=$?
  ((code != 124)) || echo "error: a step of the preflight did not end within $PREFLIGHT_S s (MEGARL_PREFLIGHT_S): $*" >&2
  return "$code"
}

has_ended() { [[ -z $1 ]] || ! kill -0 "$1" 2>/dev/null; }
# Whether a node's Ray is not there any more.
has_lost_ray() { has_ended "$ray" || compgen -G "$MEGARL_JOB_DIR/ended-*" >/dev/null; }
has_answer() { [[ -s $MEGARL_JOB_DIR/address || -n $stop ]] || has_lost_ray; }

run_driver() {
  local lost='' patience=$WITHOUT_NODES_S limit='' forwarded=''
  "${start_driver[@]}" "cluster.ray_address=$(<"$MEGARL_JOB_DIR/address")" &
  driver=$!
  until has_ended "$driver"; do
    sleep 1 || true
    # What the job was asked to do, to the driver, once there is one.
    if [[ -n $stop && $forwarded != "$stop" && -s $MEGARL_JOB_DIR/driver ]]; then
      ! kill -s "$stop" "$(<"$MEGARL_JOB_DIR/driver")" || forwarded=$stop
    fi
    [[ $stop != TERM ]] || patience=5
    [[ $stop != USR1 || -n $limit ]] || limit=$((SECONDS + $(count_seconds_left)))
    if [[ -z $lost ]] && has_lost_ray; then
      lost=$SECONDS
      say "a node's Ray has ended, see $MEGARL_LOG_DIR; the driver has $patience s to end"
    fi
    if ((SECONDS > ${lost:-SECONDS} + patience || SECONDS > ${limit:-SECONDS})); then
      say "the driver has not ended in time"
      wait_until 6 kill_marked "driver-$SLURM_JOB_ID" || true
      kill -KILL "$driver" 2>/dev/null || true
    fi
  done
  code=0
  wait "$driver" || code=$?
  say "the driver has ended with code $code"
}

read_newest() { sed 's,^,checkpoints/,' "$run_dir/checkpoints/latest" 2>/dev/null || echo none; }

# How the job ends, after Ray on all nodes: the driver's code counts, unless another start may bring it further.
end() {
  local code=${1:-$EXIT_USR1} cause='' how=failed
  [[ $stop == TERM ]] || ((code == 0 || code == 2)) || cause=$(find_cause "$code")
  ((code != 0 && code != EXIT_USR1)) || how=ended
  wait_until 6 kill_marked "driver-$SLURM_JOB_ID" || true
  touch "$MEGARL_JOB_DIR/over-$how" || say "$MEGARL_JOB_DIR cannot be written: Slurm ends Ray with the job"
  wait_until "$TEARDOWN_S" has_ended "$ray" || say "Ray did not end within $TEARDOWN_S s; Slurm kills it with the job"
  rm -rf "$MEGARL_JOB_DIR"
  rmdir --ignore-fail-on-non-empty "$run_dir/.slurm" || true
  remove_left_over
  if [[ $stop == TERM ]]; then
    say "ended by Slurm: scancel, the time limit, or a node that was lost"
    exit 143
  fi
  [[ -z $cause ]] || requeue "$cause" "$code"
  exit "$code"
}

# Why another start may bring the run further, after the driver's code $1; nothing where it may not.
find_cause() {
  local said
  if [[ $stop == USR1 && ($1 == "$EXIT_USR1" || $1 == 137) ]]; then
    echo SIGUSR1
  elif (($1 == 143)); then
    ! ask_job | grep -q ' PreemptTime=[0-9]' || echo "preempted"
  elif [[ -n $ray ]] && wait_until "$NOTICE_S" has_lost_ray; then
    # Ray's own command takes seconds to see that one of its processes is gone.
    said=$(cd "$MEGARL_JOB_DIR" && grep -sH '' ended-* | sed 's/^ended-/ on /; s/:/: /' | paste -sd,) || true
    echo "Ray has ended${said:- on a node}"
  elif ! said=$(timeout "$SLURM_S" "${touch_nodes[@]}" 2>&1); then
    # A node that is lost, or srun itself.
    echo "not every node answers ($(tail -n 1 <<<"$said"))"
  elif (($1 > 128)); then
    echo "the driver was killed by SIG$(kill -l $(($1 - 128)))"
  fi
}

ask_job() { timeout "$SLURM_S" scontrol show job "$job" || true; }

# Until a job that was asked to stop must be requeued; many where Slurm does not answer.
count_seconds_left() {
  local end
  end=$(ask_job | sed -n 's/.* EndTime=\([^ ]*\).*/\1/p')
  end=$(date -d "${end:-Unknown}" +%s 2>/dev/null) || end=$(date -d '10 years' +%s)
  echo $((end - MARGIN_S - $(date +%s)))
}

# Queue the job again for the cause $1, or end with code $2.
requeue() {
  local newest
  newest=$(read_newest)
  if [[ $newest == "$begun_from" ]]; then
    ((num_starts <= MAX_REPEATS)) || give_up "$1" "$2"
    # The next start would do the same.
    [[ $1 != SIGUSR1 ]] || ((SECONDS <= $(count_seconds_left))) || give_up "SIGUSR1: this start's time is over" "$2"
  fi
  say "$1: requeued; it resumes from the newest checkpoint in $run_dir ($newest)"
  stop=''
  wait_until "$REQUEUE_S" is_requeued || say "Slurm does not requeue the job; by hand: $again"
  exit "$EXIT_USR1"
}

# Ask for it, until Slurm ends this start of the job, scontrol included: the controller may not answer at once.
is_requeued() {
  timeout "$SLURM_S" scontrol requeue "$job" || true
  sleep 3 || true
  [[ $stop == TERM ]]
}

# End with code $2 after the cause $1: another start would change nothing.
give_up() {
  local why
  why="$1: not requeued: $num_starts start$( ((num_starts == 1)) || echo s) brought no checkpoint (newest: $(read_newest))"
  say "$why. After a time limit give it more (sbatch --time=, --signal=B:USR1@SECONDS), or make iterations shorter" \
    "(checkpoint.save_every=1); to go on: $again"
  rm -f "$starts"
  rmdir --ignore-fail-on-non-empty "$run_dir/.slurm" 2>/dev/null || true
  # Where the driver could not, while steps still start.
  timeout "$PREFLIGHT_S" "${on_head[@]}" "${inside[@]}" "$MEGARL_PYTHON" -m megarl.run.command "$run_dir" "$why" || true
  exit "$2"
}

# A task of an array by its own name: that of the last one's id is the whole array's.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-${SLURM_JOB_ID:-}}
MEGARL_HOME=${MEGARL_HOME:-$(dirname "$(dirname "$(realpath "${BASH_SOURCE[0]}")")")}
# sbatch runs a copy of this file, from its spool folder.
[[ -z $job || -f $MEGARL_HOME/slurm/node.sh ]] ||
  MEGARL_HOME=$(ask_job | sed -n 's,^ *Command=\(.*\)/slurm/train\.sh.*,\1,p')
[[ -f $MEGARL_HOME/slurm/node.sh ]] || MEGARL_HOME=${SLURM_SUBMIT_DIR:-$MEGARL_HOME}
[[ -f $MEGARL_HOME/slurm/node.sh ]] ||
  fail "MEGARL_HOME: found '$MEGARL_HOME', which has no slurm/node.sh; name megarl's directory"
[[ ${1:-} != --help ]] || exec sed -n '2,4s/^# //p' "$MEGARL_HOME/slurm/train.sh"
# shellcheck source=slurm/clean.sh
source "$MEGARL_HOME/slurm/clean.sh"
if [[ ${1:-} == --local || ${1:-} == --submit || ${1:-} == --attach ]]; then
  # shellcheck source=slurm/local.sh
  source "$MEGARL_HOME/slurm/local.sh"
  "${1#--}_job" "${@:2}"; exit
fi
[[ -n ${SLURM_JOB_ID:-} ]] || fail "SLURM_JOB_ID: not set; sbatch slurm/train.sh ... starts a job, slurm/train.sh --local ... prints what it would do"
stop='' ray=''
trap 'stop=${stop:-USR1}' USR1
trap 'stop=TERM' TERM
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
read_arguments "$@"
compose
mkdir -p "$MEGARL_LOG_DIR"
rm -rf "$MEGARL_JOB_DIR"
# A line for each start, with the checkpoint that it goes on from; Slurm itself may have queued the job again.
starts=$MEGARL_LOG_DIR/starts-$job
begun_from=$(read_newest)
((${SLURM_RESTART_COUNT:-0} > 0)) || rm -f "$starts"
echo "$begun_from" >>"$starts"
num_starts=$(uniq -c "$starts" | tail -n 1 | awk '{ print $1 }')
((num_starts <= 1 + MAX_REPEATS)) || give_up "start $((${SLURM_RESTART_COUNT:-0} + 1))" 1
mkdir -p "$run_dir/.slurm"
mkdir -m 700 "$MEGARL_JOB_DIR"
# Whoever has the token can run code in this Ray, which listens on the network.
(umask 077; od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$MEGARL_JOB_DIR/token")
say "job $job, start $((${SLURM_RESTART_COUNT:-0} + 1)), on ${nodes[*]}: megarl.$command ${arguments[*]}"

found=$(look "${touch_nodes[@]}") || { say "srun starts no step on every node"; end 1; }
# Nodes of one switch are neighbours, those of the first node's come first: ranks are placed in this order.
MEGARL_NODES=$(grep '^MEGARL_NODE ' <<<"$found" | sort -k3,3n |
  awk 'NR == 1 { first = $2 } { print (NR > 1), ($2 != first), $0 }' |
  sort -k1,1 -k2,2 -k4,4 -k5,5n | awk '{ print $NF }' | paste -sd,)
export MEGARL_NODES
look "${check_nodes[@]}" >"$MEGARL_JOB_DIR/nodes" || end $?
look "${check_job[@]}" <"$MEGARL_JOB_DIR/nodes" >"$MEGARL_JOB_DIR/settings" || end $?
[[ -z $stop ]] || end

"${start_ray[@]}" &
ray=$!
wait_until "$HEAD_S" has_answer || true
[[ -z $stop ]] || end
[[ -s $MEGARL_JOB_DIR/address ]] || { say "Ray has ended, or gave no address within $HEAD_S s: $MEGARL_LOG_DIR"; end 1; }
say "Ray at $(<"$MEGARL_JOB_DIR/address") on $MEGARL_NODES"
run_driver
end "$code"
