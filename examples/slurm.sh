#!/usr/bin/env bash
# Train on several machines under SLURM, from one job to the next until the run is done.
#
#   sbatch examples/slurm.sh dpo --config dpo.yaml --output /shared/RUN
#
# Adjust the lines that begin with #SBATCH. The output, the data, the model and the store (TROPISM_STORE) must lie on a
# disk that all machines see. The run is saved when its time is nearly up, and the job queues itself again; a run that is
# done, or fails, is not queued again.
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
[ -n "$output" ] || { echo "give --output, on a disk that all machines see" >&2; exit 2; }

# Since SLURM 22.05 srun does not take this over from sbatch, and would leave one CPU to each machine's torchrun.
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# After a signal torchrun kills what has not ended; by default after 30 seconds, and a save may take longer. Read by
# torch 2.13; 2.11 always takes 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}

# SIGUSR1, as #SBATCH --signal=USR1@600 sends it, would else kill torchrun and leave its processes behind.
srun --kill-on-bad-exit=1 torchrun \
  --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$gpus" --rdzv-id "$SLURM_JOB_ID" \
  --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  --rdzv-backend c10d --rdzv-endpoint "$first:29500" \
  -m tropism "$@" --resume auto --max-time "${minutes}min" --parallel.replicate "$SLURM_JOB_NUM_NODES"
code=$?

# torchrun says 1 for a run that was stopped and for one that failed; the manifest knows which it was.
status=$(sed -n 's/^ *"status": "\([a-z]*\)".*/\1/p' "$output/manifest.json" 2>/dev/null | head -n 1)
if [ "$status" = "stopped" ]; then
  exec scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
