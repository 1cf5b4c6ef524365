#!/bin/bash
# Vast.ai: the onstart script of an instance with one GPU or several, rented or interruptible. Values are variables:
#
#   vastai create instance OFFER --image pytorch/pytorch --disk 60 --onstart launch/vast.sh \
#     --env '-e REPO=https://... -e FLAGS="--config recipes/configs/gb1.yaml"'
#
# It runs whenever the instance starts, also after a pause, and the run goes on from its last checkpoint: Vast gives no
# signal, hence --save_minutes. After status 75 (--max_hours) it starts again; any other status ends it. At the end the
# instance stops, so that only its disk costs; start it to fetch what is in OUTPUT_DIR, delete OUTPUT_DIR/ended to train
# on. Checked with the parser of vastai 1.9; not run on Vast.

# ---- edit, or give by --env ----
REPO=${REPO:?set it to the git address of hf_ext by --env}
FLAGS=${FLAGS:?set it to flags of hf-ext train by --env}  # words without spaces in them, else by --config
OUTPUT_DIR=${OUTPUT_DIR:-$HOME/outputs}   # on the disk of the instance, which a pause leaves
MAX_RESTARTS=${MAX_RESTARTS:-100}         # a --max_hours too short for one step would start for ever
STOP=${STOP:-yes}                         # no: the instance goes on, and costs, when the run has ended
# ---- end of what to edit ----

if [ -e "$OUTPUT_DIR/ended" ]; then exit 0; fi
cd "$HOME" && mkdir -p "$OUTPUT_DIR" || exit 1
[ -d hf_ext ] || git clone --depth 1 "$REPO" hf_ext || exit 1
cd hf_ext && pip install -q -e . || exit 1
source launch/nccl.sh

# torchrun ends with 1 whatever its processes ended with; those add their status to this file: the first is the cause.
export HF_EXT_STATUS_FILE=$OUTPUT_DIR/statuses TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110
read -ra flags <<<"$FLAGS"
for ((start = 0; start <= MAX_RESTARTS; start++)); do
  : >"$HF_EXT_STATUS_FILE"
  torchrun --standalone --nproc_per_node gpu -m hf_ext train \
    --output_dir "$OUTPUT_DIR/run" --save_minutes 15 "${flags[@]}"
  status=$?
  if [ "$status" -ne 0 ] && read -r said <"$HF_EXT_STATUS_FILE"; then status=$said; fi
  [ "$status" -eq 75 ] || break
done
echo "vast.sh: ended with status $status" | tee "$OUTPUT_DIR/ended"
[ "$STOP" = no ] || { pip install -q vastai && vastai stop instance "$CONTAINER_ID" --api-key "$CONTAINER_API_KEY"; }
exit "$status"
