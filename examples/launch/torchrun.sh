#!/bin/sh
# One line on every node, under torchrun's elastic agent.   HEAD=node0:29400 DEVICES=8 sh torchrun.sh RECIPE
# Between 1 and 2 nodes: a node that is lost leaves a run of half the ranks behind, one that comes back joins it.
set -eu
: "${HEAD:?the node that hosts the rendezvous, and a port; it is the one node that must not be lost}"

# Agents that share the rendezvous' store tell a node that joins later nothing of where to meet (torch 2.9 to 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun --nnodes 1:2 --nproc-per-node "${DEVICES:-8}" --max-restarts 10 \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD" --rdzv-id accelbridge \
  -m accelbridge train "$1" --resume auto
