# shellcheck shell=bash
# Sourced by train.sh and node.sh: the end of a job's processes and files on a node.

# Wait up to $1 seconds until the command that follows succeeds.
wait_until() {
  local end=$((SECONDS + $1))
  shift
  until "$@"; do
    ((SECONDS < end)) || return 1
    sleep 0.2 || true # a signal may end it
  done
}

# Process ids that have MEGARL_MARK=$1 in their environment.
list_marked() (
  unset MEGARL_MARK # else grep would find itself
  grep -lzxF "MEGARL_MARK=$1" /proc/[0-9]*/environ 2>/dev/null | grep -oE '[0-9]+' || true
)

are_gone() { [[ -z $(list_marked "$1") ]]; }

# Kill them; false while any is left.
kill_marked() {
  list_marked "$1" | (unset MEGARL_MARK; xargs -r kill -KILL 2>/dev/null) || true
  are_gone "$1"
}

# Remove what megarl's killed processes have left, by the process id in the names.
remove_left_over() {
  local path
  for path in /tmp/megarl-* /dev/shm/megarl-*; do
    if [[ ${path##*/} =~ ^megarl-(sync-|sglang-)?([0-9]+)-[A-Za-z0-9_]+$ && ! -d /proc/${BASH_REMATCH[2]} ]]; then
      rm -rf "$path" 2>/dev/null || true
    fi
  done
}
