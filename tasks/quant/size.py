"""How much of an engine's memory the weights of a model take."""

import math
import re
from pathlib import Path

CAST = {"F64", "F32", "F16", "BF16"}  # an engine holds them in its own type


def served_bytes(folder: Path, dtype: str) -> int:
    """Bytes of the weights in `folder` in an engine of `dtype`: a checkpoint may hold wider ones, and a copy that was
    compared with those would seem smaller than it is."""
    from safetensors import safe_open

    own, total = 4 if dtype == "float32" else 2, 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "np") as weights:
            for name in weights.keys():  # noqa: SIM118  (it is no mapping)
                tensor = weights.get_slice(name)
                kind, bits = tensor.get_dtype(), re.search(r"\d+", tensor.get_dtype())
                width = own if kind in CAST else int(bits[0]) // 8 if bits else 1
                total += width * math.prod(tensor.get_shape())
    return total
