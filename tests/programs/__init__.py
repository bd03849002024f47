"""Other people's models, trainers and rules with a converted model: `make programs`.

The packages are in the extra `programs`. pytest collects nothing here.
"""

from tests.programs import operators

operators.declare()  # before any module of this folder imports torchvision, or a library that does
