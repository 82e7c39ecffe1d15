"""torch's DTensor caches outlive the process groups they name.

Dispatch is cached by meshes, which are equal where their ranks and axes are. After the groups of one run are gone, a
second run in the same process gets gradients on the first one's mesh, whose groups no longer exist ("Could not
resolve the process group registered under the name ..."; torch 2.9 to 2.13).
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor


def forget_meshes() -> None:
    """Empty them; called where process groups are destroyed."""
    # Not at the top: this loads inductor, which writes TORCHINDUCTOR_CACHE_DIR into the environment.
    from torch.distributed.tensor import _redistribute, debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)  # torch 2.10 and later: it has a part in C++
    if clear is not None:
        clear()
    else:
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
