"""Number formats that a run can choose from."""

from __future__ import annotations

from typing import Literal

Precision = Literal["auto", "fp32", "bf16"]
SamplingDtype = Literal["float32", "bfloat16", "float16"]
