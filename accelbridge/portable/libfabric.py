"""Variables of libfabric, which collective libraries of several vendors reach a network through."""

from __future__ import annotations

from collections.abc import Mapping

CXI: Mapping[str, str] = {
    "FI_MR_CACHE_MONITOR": "userfaultfd",
    "FI_CXI_DISABLE_HOST_REGISTER": "1",
    "FI_CXI_DEFAULT_CQ_SIZE": "131072",
    "FI_CXI_DEFAULT_TX_SIZE": "2048",
    "FI_CXI_RDZV_PROTO": "alt_read",
    "FI_CXI_RDZV_EAGER_SIZE": "0",
    "FI_CXI_RDZV_THRESHOLD": "0",
    "FI_CXI_RDZV_GET_MIN": "0",
    "FI_CXI_RX_MATCH_MODE": "hybrid",
}
"""Of the provider for Slingshot 11."""
CXI_SOURCE = "HewlettPackard/shs-ccl-docs, ccl_env.sh of 2026-04-30 (438fcce)"
