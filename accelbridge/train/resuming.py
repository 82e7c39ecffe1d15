"""Before a run goes on: the bytes of its checkpoint are verified on all ranks, which all take the same one."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from accelbridge.checkpoint.load import damage, verify
from accelbridge.checkpoint.manifest import Manifest
from accelbridge.checkpoint.save import sweep
from accelbridge.checkpoint.together import together
from accelbridge.checkpoint.write import cannot_write
from accelbridge.errors import AccelbridgeError, CheckpointError
from accelbridge.train.logs import log
from accelbridge.train.loss_scale import PREFIX
from accelbridge.train.resume import CHECKPOINTS, PassedOver, Resume, check_same_order, newest_intact

if TYPE_CHECKING:
    from accelbridge.train.prepare import Prepared


def settle(prepared: Prepared, group: dist.ProcessGroup | None) -> Resume | None:
    """The checkpoint that all ranks go on from, every byte of it verified. Every rank of ``group`` calls this.

    With ``--resume auto`` a damaged one is passed over for the next older one. Raises the same CheckpointError on all
    ranks where there is none, or where the one that was named is damaged.
    """
    resume = _of_rank_0(group, lambda: prepared.resume)
    while resume is not None:
        if not resume.automatic:
            verify(resume.path, resume.manifest, group)
            return resume
        found = damage(resume.path, resume.manifest, group)
        if not found:
            return resume
        passed = (*resume.passed_over, PassedOver(resume.path, f"{'; '.join(found)}; {resume.path.name} is damaged"))
        resume = _of_rank_0(group, lambda passed=passed: _older(prepared, passed))
    return None


def _older(prepared: Prepared, passed: tuple[PassedOver, ...]) -> Resume | None:
    try:
        resume = newest_intact(prepared.config, prepared.output / CHECKPOINTS, passed)
        if resume is not None:
            check_same_order(prepared.config, resume, prepared.plan.contract)
    except AccelbridgeError as error:
        raise CheckpointError(str(error)) from error
    return resume


def _of_rank_0(group: dist.ProcessGroup | None, choose: Any) -> Resume | None:
    """What rank 0 finds: ranks on several hosts may see a shared folder at different moments."""
    first = group is None or dist.get_rank(group) == 0
    return together(group, lambda: choose() if first else None)[0]


def clear_the_way(root: Path, resume: Resume | None, group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    """Remove what killed processes left in ``root`` and rename what ``resume`` passed over: nothing is overwritten.

    Rank 0 does it, all call it; raises the same CheckpointError on all. Returns fields of one event per folder.
    """
    first = group is None or dist.get_rank(group) == 0
    passed = resume.passed_over if resume is not None else ()

    def clear() -> list[dict[str, Any]]:
        if not first:
            return []
        try:
            sweep(root)
            return [_set_aside(entry) for entry in passed]
        except OSError as error:
            raise cannot_write(Path(error.filename or root), error) from error

    return together(group, clear)[0]


def _set_aside(entry: PassedOver) -> dict[str, Any]:
    names = (entry.path.with_name(f"{entry.path.name}.{entry.suffix}{f'.{n}' if n else ''}") for n in count())
    aside = next(path for path in names if not path.exists())
    entry.path.rename(aside)
    return {"checkpoint": entry.path.name, "fault": entry.fault, "renamed": aside.name}


def tell(passed: list[dict[str, Any]], resume: Resume | None) -> list[str]:
    """One line per checkpoint that was passed over, which also go to this rank's log."""
    lines = [
        f"PASSED OVER {entry['checkpoint']}: {entry['fault']}; it is kept as {entry['renamed']}; going on from "
        f"{resume.path.name if resume else 'the start'}"
        for entry in passed
    ]
    for line in lines:
        log.warning("%s", line)
    return lines


def absent_entries(manifest: Manifest, world_size: int, backend: str, amax_histories: bool) -> tuple[str, ...]:
    """Prefixes of entries that a checkpoint has not, or has for other ranks or another kind of device; they stay as
    they start."""
    same_ranks = manifest.world_size == world_size and manifest.plan.get("backend") == backend
    unscaled = manifest.setting("recipe", "precision.compute") != "float16"
    return (
        *(() if same_ranks else ("rng.",)),
        *((PREFIX,) if unscaled else ()),
        *(() if amax_histories else ("fp8.",)),
    )
