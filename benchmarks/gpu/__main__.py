"""`python -m benchmarks.gpu`: a package that is missing is said before any of them is imported."""

import sys
from importlib.util import find_spec

NEEDED = ("numpy", "array_api_compat", "torch", "triton", "pytest", "pytest_timeout")


if __name__ == "__main__":
    if absent := [name.replace("_", "-") for name in NEEDED if find_spec(name) is None]:
        print(f"missing here: pip install {' '.join(absent)}", file=sys.stderr)
        sys.exit(2)
    from benchmarks.gpu.command import main

    sys.exit(main())
