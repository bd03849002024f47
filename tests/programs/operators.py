"""torchvision's operators, by name only.

PyPI's wheels of torchvision are built for CUDA. Beside a torch for CPU, the compiled operators do
not load, and `import torchvision` raises "operator torchvision::nms does not exist". No model here
calls such an operator, but its name must exist.
"""

import torch

_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_libraries: list[torch.library.Library] = []  # a name is gone with the last reference to a library


def declare() -> None:
    """Declare the operators that do not exist."""
    if torch.version.cuda or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in _SCHEMAS.items():
        library.define(name + schema)
    _libraries.append(library)
