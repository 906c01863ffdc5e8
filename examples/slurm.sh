#!/usr/bin/env bash
# Train on several machines under SLURM, from one job to the next until the run is done.
#
#   sbatch examples/slurm.sh dpo --config dpo.yaml --output /shared/RUN
#
# Adjust the lines that begin with #SBATCH. The output, the data, the model and the store (TROPISM_STORE) must be on a
# disk that all machines see. The run saves a checkpoint before the time limit, and the job requeues itself. A run that
# is done, or failed, is not requeued.
#SBATCH --job-name=tropism
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --output=%x-%j.log
set -uo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
gpus=${SLURM_GPUS_ON_NODE:-8}
minutes=${TROPISM_MINUTES:-225}  # below --time, so that a checkpoint is written before the job is ended
output=""
previous=""
for argument in "$@"; do
  [ "$previous" = "--output" ] && output=$argument
  case $argument in --output=*) output=${argument#--output=} ;; esac
  previous=$argument
done
[ -n "$output" ] || { echo "--output is required, on a disk that all machines see" >&2; exit 2; }

# Since SLURM 22.05 srun does not take this from sbatch, and would give one CPU to each machine's torchrun.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# After a signal torchrun kills processes that have not ended, by default after 30 seconds. A save may take longer.
# torch 2.13 reads this; torch 2.11 always waits 30 seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}

# Processes of a stopped run leave a note in the log directory of their torchrun.
notes="${output%/}.torchrun-$SLURM_JOB_ID"
rm -rf "$notes"

# Otherwise SIGUSR1, as sent by #SBATCH --signal=USR1@600, would kill torchrun and leave its processes running.
srun --kill-on-bad-exit=1 torchrun \
  --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$gpus" --log-dir "$notes" --rdzv-id "$SLURM_JOB_ID" \
  --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  --rdzv-backend c10d --rdzv-endpoint "$first:29500" \
  -m tropism "$@" --resume auto --max-time "${minutes}min" --parallel.replicate "$SLURM_JOB_NUM_NODES"
code=$?

# torchrun exits with 1 for a stopped run and for a failed one. The note tells which it was.
stopped=$(find "$notes" -name tropism-stopped -print -quit 2>/dev/null)
rm -rf "$notes"
if [ "$code" -ne 0 ] && [ -n "$stopped" ]; then
  exec scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
