"""Types of the parameters of commands, with how their text is read."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from tropism.options import check_file_name, check_size

Flat = Parameter(name="*")
Name = Annotated[str, Parameter(converter=lambda _, tokens: check_file_name(tokens[0].value))]
Word = Annotated[str, Parameter(converter=lambda _, tokens: tokens[0].value)]
File = Annotated[Path, Parameter(converter=lambda _, tokens: Path(check_file_name(tokens[0].value)))]
Output = Annotated[Path, Parameter(
    converter=lambda _, tokens: Path(check_file_name(tokens[0].value, for_models=True)))]
Size = Annotated[str, Parameter(converter=lambda _, tokens: check_size(tokens[0].value))]
DeviceName = Literal["h100-80gb", "h200", "a100-80gb", "rtx4090", "cpu"]
DTypeName = Literal["fp32", "bf16", "fp16", "fp64", "float32", "bfloat16", "float16", "float64"]
GgufFormat = Literal["f32", "bf16", "f16", "q8_0", "q4_k_m"]
