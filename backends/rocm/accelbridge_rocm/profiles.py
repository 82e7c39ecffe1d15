"""Network profiles for RCCL: data with sources, off unless ``backend.profile`` names one.

RCCL reads NCCL's variables and some of its own; NVLS, CollNet and MSCCL don't exist in it (MSCCL since 2.28.3), and no
profile names them. What differs by site (interfaces, adapters) is the user's environment, which wins.
"""

from __future__ import annotations

from accelbridge.backend import Profile
from accelbridge.portable.libfabric import CXI, CXI_SOURCE

_TIPS = "RCCL documentation, RCCL usage tips, ROCm 7.14"
_NCCL = "NCCL 2.30.7 user guide, Environment Variables, which RCCL follows"

PROFILES = {
    "single-node": Profile(
        "runs on one host: RCCL's bootstrap stays on the loopback interface",
        {"NCCL_SOCKET_IFNAME": "lo"},
        f"{_NCCL}: NCCL_SOCKET_IFNAME",
    ),
    "infiniband": Profile(
        "hosts joined by InfiniBand or RoCE: no fall back to sockets", {"NCCL_NET": "IB"}, f"{_NCCL}: NCCL_NET"
    ),
    "slingshot": Profile(
        "HPE hosts joined by Slingshot 11, four interfaces each",
        {
            "HSA_FORCE_FINE_GRAIN_PCIE": "1",
            "NCCL_NET": "AWS Libfabric",
            "NCCL_CROSS_NIC": "1",
            "NCCL_NET_GDR_LEVEL": "PHB",
            "NCCL_SOCKET_IFNAME": "hsn0,hsn1,hsn2,hsn3",
            **CXI,
        },
        CXI_SOURCE,
        needs="aws-ofi-nccl built for RCCL, and srun --network=disable_rdzv_get",
    ),
    "mi300x-full": Profile(
        "hosts of which all eight MI300X are used", {"NCCL_MIN_NCHANNELS": "112"}, f"{_TIPS}: MI300X"
    ),
    "mi300x-part": Profile(
        "hosts of which fewer than eight MI300X are used", {"NCCL_MIN_NCHANNELS": "32"}, f"{_TIPS}: MI300X"
    ),
    "pcie-p2p": Profile(
        "GPUs that reach each other over PCIe alone", {"HSA_FORCE_FINE_GRAIN_PCIE": "1"}, f"{_TIPS}: peer-to-peer"
    ),
    "gfx90a-latency": Profile(
        "a workaround for MI200 under ROCm 7.13 or newer, where small messages take 5 to 10 times as long",
        {"HSA_NO_SCRATCH_RECLAIM": "1"},
        f"{_TIPS}; ROCR-Runtime documentation, Environment variables",
    ),
    "tuning-guide": Profile(
        "hosts set up as AMD's tuning guide for MI300X says",
        {"NCCL_IGNORE_CPU_AFFINITY": "1", "HIP_FORCE_DEV_KERNARG": "1"},
        f"{_TIPS}, and AMD Instinct MI300X workload optimization",
    ),
}
