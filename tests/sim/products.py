"""Scaled products as a GPU's backend makes them, with its table and its limits, up to the library's call: which is
emulated, by the simulated device."""

from __future__ import annotations

import torch
from torch import Tensor

from accelbridge.portable.fp8 import EmulatedFp8
from accelbridge.portable.scaled_mm import TorchScaledMm
from accelbridge.precision.quantized import QuantizedTensor


class TableProducts(TorchScaledMm):
    """What the table refuses is refused, and what it emulates is emulated, by the code that runs on the GPU."""

    def _product(
        self, a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        return EmulatedFp8.scaled_mm(self, a, b, out_dtype, bias)
