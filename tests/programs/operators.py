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
    """Declare the operators if torchvision cannot be imported without them."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
        library = torch.library.Library("torchvision", "DEF")
        for name, schema in _SCHEMAS.items():
            library.define(name + schema)
        _libraries.append(library)
