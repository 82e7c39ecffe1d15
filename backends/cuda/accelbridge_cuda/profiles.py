"""Network profiles for NCCL: data with sources, off unless ``backend.profile`` names one.

NCCL's own tuner knows the topology: what its documentation calls debugging (algorithms, protocols, channel counts) is
in no profile but the workarounds. Most of these only make a missing network an error instead of a silent fall back to
sockets. What differs by site (interfaces, adapters, traffic classes) is the user's environment, which wins.
"""

from __future__ import annotations

from accelbridge.backend import Profile
from accelbridge.portable.libfabric import CXI, CXI_SOURCE

_NCCL = "NCCL 2.30.7 user guide, Environment Variables"
_OFI = "aws-ofi-nccl, the NCCL plugin for libfabric"

PROFILES = {
    "single-node": Profile(
        "runs on one host: NCCL's bootstrap stays on the loopback interface",
        {"NCCL_SOCKET_IFNAME": "lo"},
        f"{_NCCL}: NCCL_SOCKET_IFNAME",
    ),
    "infiniband": Profile(
        "hosts joined by InfiniBand: no fall back to sockets",
        {"NCCL_NET": "IB"},
        f"{_NCCL}: NCCL_NET",
    ),
    "roce": Profile(
        "hosts joined by RoCE v2: no fall back to sockets",
        {"NCCL_NET": "IB", "NCCL_IB_ROCE_VERSION_NUM": "2"},
        f"{_NCCL}: NCCL_NET, NCCL_IB_ROCE_VERSION_NUM",
        needs="the site's traffic class in NCCL_IB_TC, where lossless traffic has one",
    ),
    "efa": Profile(
        "AWS hosts with Elastic Fabric Adapters: no fall back to sockets",
        {"NCCL_NET": "AWS Libfabric", "FI_PROVIDER": "efa"},
        "aws-ofi-nccl wiki, Environment Variables, 2025-08-12: FI_PROVIDER; the plugin's name as NCCL logs it, "
        "aws/aws-ofi-nccl#24",
        needs=_OFI,
    ),
    "slingshot": Profile(
        "HPE hosts joined by Slingshot 11, four interfaces each",
        {
            "NCCL_NET": "AWS Libfabric",
            "NCCL_CROSS_NIC": "1",
            "NCCL_NET_GDR_LEVEL": "PHB",
            "NCCL_SOCKET_IFNAME": "hsn0,hsn1,hsn2,hsn3",
            **CXI,
        },
        f"{CXI_SOURCE}; without some of these GPUDirect traffic can be corrupted (NVIDIA/nccl#2001)",
        needs=f"{_OFI}, and srun --network=disable_rdzv_get",
    ),
    "nvl72": Profile(
        "racks of one NVLink domain (GB200 NVL72): no fall back to the network within it",
        {"NCCL_MNNVL_ENABLE": "1", "NCCL_CUMEM_ENABLE": "1"},
        f"{_NCCL}: NCCL_MNNVL_ENABLE, NCCL_CUMEM_ENABLE; MNNVL tuning guide: NCCL 2.25.2 or newer",
        needs="an IMEX domain of all hosts",
    ),
    "no-nvls": Profile(
        "a workaround where NVLink SHARP fails or hangs",
        {"NCCL_NVLS_ENABLE": "0"},
        "NVIDIA/nccl#2077, #1197, #1788; pytorch/ao#3841",
    ),
}
