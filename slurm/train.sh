#!/usr/bin/env bash
# sbatch --signal=B:USR1@3000 slurm/train.sh algo=vapo model=qwen32b [overrides]   train; `megarl plan` says how early
# sbatch --nodes=2 slurm/train.sh resume=RUN_DIR                                 resume a run
# sbatch slurm/train.sh --command=evaluate model=... data=...                    evaluate
# slurm/train.sh --submit|--local [--nodes=N --gpus-per-node=N ...] [...]   check that first; then sbatch, or print alone
# slurm/train.sh --attach JOBID [COMMAND ...]                   a shell beside a running job's driver, in its Ray
#
# docs/slurm.md says when a job is requeued and how it resumes. What differs from site to site is in slurm/site.sh.
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
SLURM_S=20         # of a word with Slurm's controller
MARGIN_S=60        # before the time limit the job is requeued, with or without the checkpoint
NOTICE_S=15        # after the driver has ended, until Ray is known to have ended before it
REQUEUE_S=40       # of trying to queue the job again
# The job is queued again after SIGUSR1, after a preemption, and where a node, its Ray or the driver was lost; it goes
# on from the newest checkpoint. A start that brought no new checkpoint is repeated at most so often, whatever ended it.
MAX_REPEATS=2
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
    # What the job was asked to do, to the driver, once there is one.
    if [[ -n $stop && $forwarded != "$stop" ]] && signal_steps driver "$stop"; then forwarded=$stop; fi
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
  local mounts all doctor what node_sh
  # Steps are single processes that do not speak MPI, whose plugin may be missing.
  step=(srun --overlap --mpi=none --cpu-bind=none --export=ALL)
  all=(--nodes="${#nodes[@]}" --ntasks="${#nodes[@]}")
  # Outside of the container, which may take minutes to unpack, each node says where it is in the network.
  # shellcheck disable=SC2016 # the node's values
  touch_nodes=("${step[@]}" "${all[@]}" bash -c 'echo "MEGARL_NODE $SLURMD_NODENAME ${SLURM_TOPOLOGY_ADDR:-}"')
  # The run's parent: its own name may have commas, as those of a sweep.
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
  on_others=("${step[@]}" --nodes=$((${#nodes[@]} - 1)) --ntasks=$((${#nodes[@]} - 1))
    --nodelist="$(IFS=,; echo "${nodes[*]:1}")")
  doctor=("${inside[@]}" "$MEGARL_PYTHON" -m megarl.plan.doctor) what=("--command=$command" "${arguments[@]}")
  check_job=("${on_head[@]}" "${doctor[@]}" --job "${what[@]}")
  check_nodes=("${step[@]}" "${all[@]}" "${doctor[@]}" --node "${what[@]}")
  compare_nodes=("${on_head[@]}" "${doctor[@]}" --compare "${what[@]}")
  # One node's Ray that ends ends all.
  node_sh=(--job-name=ray --kill-on-bad-exit=1 "${inside[@]}" bash "$MEGARL_HOME/slurm/node.sh")
  start_head=("${on_head[@]}" "${node_sh[@]}")
  start_others=("${on_others[@]}" "${node_sh[@]}")
  start_driver=("${on_head[@]}" --job-name=driver "${inside[@]}" env "MEGARL_MARK=$driver_mark" "$MEGARL_PYTHON" -m megarl.${command/#evaluate/cli evaluate} "${arguments[@]}")
}

# A,B:C -> A:A,B:C, as pyxis wants them.
pair_mounts() { tr , '\n' <<<"$1" | sed '/:/!s/.*/&:&/' | paste -sd,; }

# Send signal $2 to the job's steps of the name $1; false where there is none. Not to srun: that ends a step by force.
signal_steps() {
  local steps
  mapfile -t steps < <(timeout "$SLURM_S" squeue --steps --noheader --jobs="$job" --format='%i %j' | awk -v name="$1" '$2 == name { print $1 }')
  ((${#steps[@]})) || return 1
  # Slurm 22.05 delivers the signal and yet says that there is no such job.
  timeout "$SLURM_S" scancel --signal="$2" "${steps[@]}" 2>/dev/null || true
}

# --- how a start of the job ends, and whether another follows

# Say it in the job's output and in the run's log.
note() {
  say "$*"
  [[ ! -f $run_dir/train.log ]] || echo "$(date '+%F %T') job $job: $*" >>"$run_dir/train.log" || true
}

# The newest checkpoint.
read_newest() { (cd "$run_dir" && sed 's,^,checkpoints/,' checkpoints/latest 2>/dev/null) || true; }

# A line for each start, with the checkpoint that it goes on from; Slurm itself may have queued the job again.
count_start() {
  starts=$run_dir/logs/slurm/starts-$job
  begun_at=$(date +%s) begun_from=$(read_newest)
  ((${SLURM_RESTART_COUNT:-0} > 0)) || rm -f "$starts"
  echo "${begun_from:-none}" >>"$starts"
  num_starts=$(tac "$starts" | awk 'NR == 1 { last = $0 } $0 != last { exit } { n++ } END { print n }')
  ((num_starts <= 1 + MAX_REPEATS)) || give_up "start $((${SLURM_RESTART_COUNT:-0} + 1))" 1
}

# How the job ends: the driver's code counts, unless another start may bring it further.
end() {
  local code=${1:-$EXIT_USR1} cause=''
  [[ $stop == TERM ]] || ((code == 0 || code == 2)) || cause=$(find_cause "$code")
  tear_down "$code"
  if [[ $stop == TERM ]]; then
    note "ended by Slurm: scancel, the time limit, or a node that was lost"
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
    ! is_preempted || echo "preempted"
  elif said=$(describe_lost) && [[ -n $said ]]; then
    echo "Ray has ended$said"
  elif ! said=$(timeout "$SLURM_S" "${touch_nodes[@]}" 2>&1); then
    # A node that is lost, or srun itself.
    echo "not every node answers ($(tail -n 1 <<<"$said"))"
  elif (($1 > 128)); then
    echo "the driver was killed by SIG$(kill -l $(($1 - 128)))"
  fi
}

# ` on n2: raylet [exit code=-9]`, where a node's Ray has ended before the driver, or just after it: Ray's own command
# takes seconds to see that one of its processes is gone.
describe_lost() {
  [[ -n $head ]] || return 0
  wait_until "$NOTICE_S" has_lost_ray || return 0
  (cd "$job_dir" && grep -sH '' ended-* | sed 's/^ended-/ on /; s/:/: /' || echo " on a node") | paste -sd,
}

has_lost_ray() { ! has_nodes || compgen -G "$job_dir/ended-*" >/dev/null; }
is_preempted() { ask_job | grep -q ' PreemptTime=[0-9]'; }
ask_job() { timeout "$SLURM_S" scontrol show job "$job" || true; }

# Seconds since 1970 at which a job that was asked to stop must be requeued; far off where Slurm does not answer.
find_time_limit() {
  local end
  end=$(ask_job | sed -n 's/.* EndTime=\([^ ]*\).*/\1/p')
  end=$(date -d "${end:-Unknown}" +%s 2>/dev/null) || end=$(($(date +%s) + 10 * 365 * 86400))
  echo $((end - MARGIN_S))
}

# Queue the job again for the cause $1, or end with code $2.
requeue() {
  local now newest
  now=$(date +%s) newest=$(read_newest)
  if [[ $newest == "$begun_from" ]]; then
    ((num_starts <= MAX_REPEATS)) || give_up "$1" "$2"
    # The next start would do the same.
    [[ $1 != SIGUSR1 ]] || ((now - begun_at <= $(find_time_limit) - now)) ||
      give_up "SIGUSR1: this start's time is over" "$2"
  fi
  note "$1: requeued; it resumes from the newest checkpoint in $run_dir (${newest:-none})"
  stop=''
  # Slurm ends this start of the job, scontrol included.
  if wait_until "$REQUEUE_S" ask_for_requeue; then
    wait_until 60 is_ended_by_slurm && exit "$EXIT_USR1"
  fi
  note "Slurm does not requeue the job; by hand: $(tell_again)"
  exit "$EXIT_USR1"
}

# The controller may not answer at once.
ask_for_requeue() { timeout "$SLURM_S" scontrol requeue "$job" || { nap && nap && is_ended_by_slurm; }; }

is_ended_by_slurm() { [[ $stop == TERM ]]; }

# End with code $2 after the cause $1: another start would change nothing.
give_up() {
  local newest why
  newest=$(read_newest)
  why="$1: not requeued: $num_starts start$( ((num_starts == 1)) || echo s) brought no checkpoint (newest: ${newest:-none})"
  note "$why. After a time limit give it more (sbatch --time=, --signal=B:USR1@SECONDS), or make iterations shorter" \
    "(checkpoint.save_every=1); to go on: $(tell_again)"
  rm -f "$starts"
  # Where the driver could not, while steps still start.
  timeout "$PREFLIGHT_S" "${on_head[@]}" "${inside[@]}" "$MEGARL_PYTHON" -m megarl.run.command "$run_dir" "$why" || true
  exit "$2"
}

# An evaluation is started again by the command that it was started with.
tell_again() {
  local again="the same again, hydra.run.dir="
  [[ ! -f $run_dir/run.json ]] || again="sbatch slurm/train.sh resume="
  echo "$again$run_dir"
}

# End Ray on all nodes; where it failed (code $1) Ray's own logs are kept.
tear_down() {
  local how=USR2
  (($1 == 0 || $1 == EXIT_USR1)) || how=USR1
  kill_marked "$driver_mark"
  if ! have_ended "$head" "$others"; then
    signal_steps ray "$how" || true
    wait_until "$TEARDOWN_S" have_ended "$head" "$others" || {
      say "Ray's steps did not end within $TEARDOWN_S s; killed"
      signal_steps ray KILL || true
    }
  fi
  rm -rf "$job_dir"
  rmdir --ignore-fail-on-non-empty "$run_dir/.slurm" || true
  remove_left_over
}

have_ended() { ! is_running "$1" && ! is_running "$2"; }

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
job_dir=$MEGARL_JOB_DIR # each job's own: another may be at work in the run's folder, which the run itself then refuses
rm -rf "$job_dir"
mkdir -p "$run_dir/logs/slurm" "$run_dir/.slurm"
mkdir -m 700 "$job_dir"
# Whoever has the token can run code in this Ray, which listens on the network.
(umask 077; od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$job_dir/token")
say "job $job, start $((${SLURM_RESTART_COUNT:-0} + 1)), on ${nodes[*]}: megarl.$command ${arguments[*]}"
count_start
check
[[ -z $stop ]] || end
start_ray
[[ -z $stop ]] || end
run_driver
end "$code"
