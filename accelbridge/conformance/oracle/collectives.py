"""What collectives give, and how far off a reduction may be.

``parts`` is what each rank contributes, in rank order. Sums of more than whole numbers are taken exactly and rounded
once to float64 (``math.fsum``), so that the reference of a float64 reduction has no error of its own worth counting.

Bounds, with u the unit roundoff of a format and gamma_k = k u / (1 - k u) (Higham, Accuracy and Stability of Numerical
Algorithms, 2nd ed., section 3.1):

* a sum of n parts in any order, added in a format ``reduced`` and rounded once to ``out``:
  ``|error| <= u_out |S| + gamma_{n-1}(u_reduced) sum_r |x_r|``. Two parts cannot show how a sum is added, since they
  are rounded once only; three can.
* an average of two parts that are not zero: 2 units in the last place of the result, because a library may divide
  before or after it adds (nccl-tests allows as much).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SIGNIFICAND_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
"""With the hidden bit."""


def roundoff(dtype: torch.dtype | str) -> float:
    """Unit roundoff of round-to-nearest."""
    return 2.0 ** -SIGNIFICAND_BITS[str(dtype).removeprefix("torch.")]


def whole_sum(parts: Sequence[Tensor]) -> Tensor:
    """Sum of whole numbers, in their dtype: exact as long as it fits."""
    return torch.stack(list(parts)).double().sum(0).to(parts[0].dtype)


def exact_sum(parts: Sequence[Tensor]) -> Tensor:
    """float64 [...]: the sum as if no addition rounded."""
    columns = torch.stack([part.double().reshape(-1) for part in parts], dim=1).tolist()
    return torch.tensor([math.fsum(column) for column in columns], dtype=torch.float64).reshape(parts[0].shape)


def sum_bound(parts: Sequence[Tensor], reduced: str) -> Tensor:
    """The bound of a sum that is added in ``reduced``; see the module's text."""
    slack = (len(parts) - 1) * roundoff(reduced)
    magnitude = torch.stack([part.double().abs() for part in parts]).sum(0)
    return roundoff(parts[0].dtype) * exact_sum(parts).abs() + slack / (1.0 - slack) * magnitude


def units_in_last_place(want: Tensor, dtype: torch.dtype) -> Tensor:
    """float64: the distance of numbers of ``dtype`` where ``want`` lies; 0 for 0."""
    _, exponent = torch.frexp(want)
    return torch.where(want == 0, 0.0, torch.ldexp(torch.full_like(want, roundoff(dtype)), exponent))


def chunk(x: Tensor, rank: int, size: int) -> Tensor:
    """The part of ``x`` that belongs to ``rank`` when it is cut in ``size`` equal parts along dimension 0."""
    rows = x.shape[0] // size
    return x[rank * rows : (rank + 1) * rows]


def exchanged(parts: Sequence[Tensor], splits: Sequence[Sequence[int]], rank: int) -> Tensor:
    """What ``rank`` holds after an all-to-all in which rank i sends its next ``splits[i][j]`` rows to rank j."""
    return torch.cat([part.split(list(row))[rank] for part, row in zip(parts, splits, strict=True)])
