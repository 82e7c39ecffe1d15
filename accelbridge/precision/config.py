"""The ``precision.fp8`` section of a recipe. Free of torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from accelbridge.config import Section

Share = Annotated[float, Field(gt=0, le=1)]
Pattern = Annotated[str, Field(min_length=1)]


class Fp8Config(Section):
    """How linear layers run in fp8 under ``precision.compute: fp8``. What else computes, computes in bfloat16.

    Terms and defaults follow Micikevicius et al., arXiv:2209.05433 (formats, delayed scaling) and the OCP Microscaling
    specification 1.0 (mx).
    """

    scaling: Literal["tensor", "delayed", "row", "block", "mx"] = "tensor"
    """How scales are made. tensor: one each, from its own largest magnitude. delayed: one each, from those of the steps
    before. row: one per row along K. block: activations and gradients 1x128, weights 128x128. mx: 1x32, powers of
    two rounded up (Mishra et al., arXiv:2506.08027; the rule of the OCP specification saturates)."""
    format: Literal["hybrid", "e4m3"] = "hybrid"
    """hybrid: activations and weights in E4M3, gradients in E5M2. e4m3: all of them in E4M3."""
    variant: Literal["auto", "fn", "fnuz", "ieee"] = "auto"
    """Which E4M3 and E5M2: fn (OCP), fnuz, ieee (E4M3 with infinities). auto: the chip's."""
    power_of_two: bool = False
    """Round scales up to powers of two, so that scaling rounds nothing. Always so with mx, and on chips that ask it."""
    history: Annotated[int, Field(ge=1, le=4096)] = 16
    """delayed: how many steps' largest magnitudes are remembered."""
    amax: Literal["max", "most_recent"] = "max"
    """delayed: which of those makes the scale."""
    margin: Annotated[int, Field(ge=0, le=8)] = 0
    """delayed: leave so many powers of two free above it."""
    exclude: list[Pattern] = Field(default_factory=lambda: ["head", "lm_head", "*.head", "*.lm_head"])
    """Linear layers that stay in bfloat16, by shell pattern of their full name; ``*`` also matches dots. A list of your
    own takes the place of this one."""
    skip_first: Annotated[int, Field(ge=0)] = 0
    """So many of the first blocks stay in bfloat16."""
    skip_last: Annotated[int, Field(ge=0)] = 0
    """The same for the last."""
    gather: bool = False
    """Gather sharded weights as fp8: half the bytes of bfloat16 on the wire. For tensor and delayed scaling."""
    pad: bool = True
    """Where a chip's products need sizes that are multiples of something, pad with zeros; else that is an error."""
    convert: bool = True
    """Take a checkpoint whose amax history belongs to another variant; else that is an error."""
    counters: bool = True
    """Count what saturates, underflows or is not finite, by layer, and warn."""
    warn_saturated: Share = 0.01
    """Share of a tensor's elements that are cut to the largest number, from which on a layer is named."""
    warn_underflowed: Share = 0.5
    """The same for elements that are not 0 and become it."""

    @model_validator(mode="after")
    def _settings_are_used(self) -> Fp8Config:
        unused = [name for name in ("history", "amax", "margin") if name in self.model_fields_set]
        if unused and self.scaling != "delayed":
            raise ValueError(
                f"{unused[0]} asked; scaling is {self.scaling}, which remembers no magnitudes; remove {unused[0]}, or "
                "set scaling: delayed"
            )
        return self
