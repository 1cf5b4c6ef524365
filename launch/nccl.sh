# NCCL, by which NVIDIA's GPUs talk to each other. The templates of this folder read these lines; what was set before,
# in your shell or by the tool that starts the job, stays. Names and defaults: NVIDIA's page "Environment Variables" of
# NCCL. Read by bash in a test; the effect on speed was not measured.

# Errors with their cause. INFO, when it hangs or is slow: also which network and which links were found.
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"

# Between machines over Ethernet (TCP): sockets per helper thread, and helper threads, for each connection (product at
# most 64). They do nothing within one machine or over InfiniBand. NCCL's own are 1 and 0 (a single socket), but 8 and 2
# on AWS, 1 and 4 on Google Cloud: put a # before both lines there. Touch them where machines wait for each other though
# the network has room.
export NCCL_NSOCKS_PERTHREAD="${NCCL_NSOCKS_PERTHREAD:-4}"
export NCCL_SOCKET_NTHREADS="${NCCL_SOCKET_NTHREADS:-2}"

# How many channels (blocks of the GPU that move data) there are at least. NCCL's own follows from the links, often 2 or
# more. More use the links better and take from the GPU what it computes with: 1 where NCCL slows the model down.
export NCCL_MIN_NCHANNELS="${NCCL_MIN_NCHANNELS:-4}"

# 0 is NCCL's own; here it overrules an /etc/nccl.conf of the machine. 1 is for a fault: P2P (NVLink, or PCIe between
# GPUs) where processes hang at the first step, InfiniBand where its driver or network is broken. Both cost much speed.
export NCCL_P2P_DISABLE="${NCCL_P2P_DISABLE:-0}"
export NCCL_IB_DISABLE="${NCCL_IB_DISABLE:-0}"
