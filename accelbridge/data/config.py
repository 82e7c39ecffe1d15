"""The ``data`` section of a recipe. Free of torch."""

from __future__ import annotations

from typing import Literal

from accelbridge.config import Section


class DataConfig(Section):
    """Which token stores a run reads, and how it cuts them into samples."""

    train: str | None = None
    """Path of the token store to train on, as ``accelbridge data build`` makes it (``OUT/train``)."""

    validation: str | None = None
    """Path of the token store to evaluate on; without one there is no evaluation."""

    document_mask: bool = True
    """A token attends only within its own document, and no target crosses from one document to the next."""

    shuffle: bool = True
    """Visit the samples of each epoch in a new order; otherwise in the order of the store."""

    verify: Literal["size", "checksum"] = "size"
    """What is checked when a store is opened: the sizes of its files, or also their checksums (reads all)."""
