# shellcheck shell=bash disable=SC2154,SC2034 # the variables are train.sh's
# Sourced by train.sh: how a start of the job ends, and whether another follows.
#
# The job is queued again after SIGUSR1, after a preemption, and where a node, its Ray or the driver was lost; it goes
# on from the newest checkpoint. A start that brought no new checkpoint is repeated at most MAX_REPEATS times, whatever
# ended it.
MAX_REPEATS=2
MARGIN_S=60  # before the time limit the job is requeued, with or without the checkpoint
NOTICE_S=15  # after the driver has ended, until Ray is known to have ended before it
REQUEUE_S=40 # of trying to queue the job again

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
  timeout "$PREFLIGHT_S" "${on_head[@]}" "${inside[@]}" "$MEGARL_PYTHON" -m megarl.run.ended "$run_dir" "$why" || true
  exit "$2"
}

# An evaluation is started again by the command that it was started with.
tell_again() {
  if [[ -f $run_dir/run.json ]]; then
    echo "sbatch slurm/train.sh resume=$run_dir"
  else
    echo "the same again, hydra.run.dir=$run_dir"
  fi
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
