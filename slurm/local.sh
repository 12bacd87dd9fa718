# shellcheck shell=bash disable=SC2154 # the variables are train.sh's
# Sourced by train.sh for --local: what a job would do, as text.

local_job() {
  local text option='' num_nodes gpus_per_node options=() rest=()
  num_nodes=$(read_default nodes) gpus_per_node=$(read_default gpus-per-node)
  for text in "$@"; do
    case $text in
      -m | --multirun | --config-dir=*) rest+=("$text") && continue ;;
      -N[0-9]*) option=--nodes options+=("$text") text=${text#-N} ;;
      -N) option=--nodes options+=("$text") && continue ;;
      --*=*) option=${text%%=*} options+=("$text") text=${text#*=} ;;
      -*) option=$text options+=("$text") && continue ;;
      # An override has an =; a word without one is the value of the option before it.
      *=* | '~'*) option='' rest+=("$text") && continue ;;
      *) if [[ -n $option ]]; then options+=("$text"); else rest+=("$text"); fi ;;
    esac
    case $option in
      --nodes) num_nodes=$text ;;
      --gpus-per-node) gpus_per_node=${text##*:} ;; # h100:8
    esac
    option=''
  done
  [[ $num_nodes =~ ^[1-9][0-9]*$ && $gpus_per_node =~ ^[0-9]+$ ]] ||
    fail "--local: found --nodes=$num_nodes --gpus-per-node=$gpus_per_node; numbers are needed"
  job=JOBID
  export SLURM_JOB_ID=JOBID SLURM_JOB_NUM_NODES=$num_nodes SLURM_GPUS_ON_NODE=$gpus_per_node
  mapfile -t nodes < <(seq -f 'node%g' "$num_nodes")
  load_site
  read_arguments "${rest[@]}"
  set_environment
  build_commands

  echo "This is what the job would do; nothing is started."
  echo
  print_command sbatch "${options[@]}" slurm/train.sh "${rest[@]}"
  sed -n 's/^#SBATCH/   /p' "$MEGARL_HOME/slurm/train.sh"
  echo
  echo "1. The configuration against the allocation, and every node: its GPUs, model.path, a Ray that was left."
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
  "$MEGARL_PYTHON" -m megarl.doctor.preflight job "--command=$command" "${arguments[@]}" | sed 's/^/    /'
}

read_default() { sed -n "s/^#SBATCH --$1=//p" "$MEGARL_HOME/slurm/train.sh"; }

print_command() {
  printf '   '
  printf ' %q' "$@"
  echo
}
