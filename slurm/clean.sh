# shellcheck shell=bash
# Sourced by train.sh and node.sh: the end of a job's processes and files on a node.

# Wait up to $1 seconds, asking every tenth of one, until the command that follows succeeds.
wait_until() {
  local tenths=$(($1 * 10))
  shift
  until "$@"; do
    ((tenths-- > 0)) || return 1
    sleep 0.1
  done
}

# Process ids whose environment says that they belong to the scratch folder $1.
list_members() {
  grep -lzxF "MEGARL_SCRATCH=$1" /proc/[0-9]*/environ 2>/dev/null | grep -oE '[0-9]+' || true
}

has_no_members() { [[ -z $(list_members "$1") ]]; }

# Kill what still belongs to the scratch folder $1, and remove the folder.
remove_scratch() {
  local members
  for _ in 1 2 3; do
    mapfile -t members < <(list_members "$1")
    ((${#members[@]})) || break
    kill -KILL "${members[@]}" 2>/dev/null || true
    wait_until 2 has_no_members "$1" || true
  done
  rm -rf "$1"
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
