#!/usr/bin/env bash
# Run torchrun, and exit with code 75 if the run was stopped and can be resumed, so that a scheduler queues it again.
#
#   examples/torchrun_resume.sh --standalone --nproc-per-node 8 -- kto --config kto.yaml --output RUN
#
# Before `--` are options of torchrun, behind it a command of tropism. torchrun itself exits with 1 for a stopped run as
# for a failed one. The processes of a stopped run leave a note in the log directory of their torchrun, which is read
# here. Training commands get `--resume auto`, so that the same line starts and resumes a run.
#
# Exit codes: 0 done, 75 stopped and resumable, else that of torchrun.
set -um  # -m: torchrun gets a process group of its own, and with it every signal once, from here

options=()
while [ $# -gt 0 ] && [ "$1" != "--" ]; do
  options+=("$1")
  shift
done
[ $# -gt 1 ] || { echo "usage: $0 [TORCHRUN OPTIONS] -- COMMAND [OPTIONS]" >&2; exit 2; }
shift
case " $* " in
  *" --resume"[\ =]*) ;;
  " kto "* | " dpo "* | " sft "* | " kd "* | " train "*) set -- "$@" --resume auto ;;
esac

# After a signal torchrun kills processes that have not ended, by default after 30 seconds. A save may take longer.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}
notes=$(mktemp -d) || exit 1
trap 'rm -rf "$notes"' EXIT

torchrun --log-dir "$notes" --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
  ${options[@]+"${options[@]}"} -m tropism "$@" &
child=$!
for signal in TERM INT HUP USR1; do
  # shellcheck disable=SC2064  # the name of the signal is meant as it is now
  trap "kill -$signal $child 2>/dev/null" "$signal"
done
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do  # a signal ended the wait, not torchrun
  wait "$child"
  code=$?
done

if [ "$code" -ne 0 ] && [ -n "$(find "$notes" -name tropism-stopped -print -quit)" ]; then
  exit 75
fi
exit "$code"
