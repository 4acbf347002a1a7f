#!/bin/bash
#SBATCH --job-name={{ job.name }}
#SBATCH --nodes={{ job.nodes }}
#SBATCH --ntasks-per-node={{ job.gpus_per_node }}
{% if not on_cpu %}
#SBATCH --gpus-per-node={{ job.gpus_per_node }}
{% endif %}
#SBATCH --cpus-per-task=8
#SBATCH --time={{ time }}
{% if partition %}
#SBATCH --partition={{ partition }}
{% endif %}
{% if account %}
#SBATCH --account={{ account }}
{% endif %}
#SBATCH --signal=TERM@{{ notice_s }}
#SBATCH --requeue

folder={{ folder }}
logs={{ logs }}
max_restarts={{ max_restarts }}
command=({{ command }})

set -u
cd -- "$folder" || exit 2
# Slurm does not create the folder of its log, so this script does
mkdir -p -- "$logs" || exit 6
echo "the log is $logs/slurm-$SLURM_JOB_ID.log"
exec >>"$logs/slurm-$SLURM_JOB_ID.log" 2>&1
# ranks authenticate each other with it; it is not stored
FLATOUT_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export FLATOUT_SECRET
# srun does not take it from the job since Slurm 22.05
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
# each rank would start a thread for every core that it sees
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$SRUN_CPUS_PER_TASK}"
# ranks end each other: srun must not kill a rank that saves because another has exited, but wait until all have saved
srun --kill-on-bad-exit=0 --wait=120 -- "${command[@]}"
# the highest code of the ranks, 128 + N for signal N
code=$?
lost="$logs/slurm-$SLURM_JOB_ID.lost"
case "$code" in
  75) scontrol requeue "$SLURM_JOB_ID" ;;  # stopped and saved
  1 | 7 | 129 | 13[1-9] | 1[4-9]?)  # crashed, lost a rank, or killed by a signal other than Ctrl-C
    echo "$code" >>"$lost"
    if [ "$(wc -l <"$lost")" -le "$max_restarts" ]; then scontrol requeue "$SLURM_JOB_ID"; fi ;;
esac
exit "$code"
