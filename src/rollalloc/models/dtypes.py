"""Number formats that a run may choose."""

from __future__ import annotations

from typing import Literal

Precision = Literal["auto", "fp32", "bf16"]
SamplingDtype = Literal["float32", "bfloat16", "float16"]
