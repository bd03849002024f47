"""All of these tests need Chainer, which multibn makes importable."""

from tests.helpers import require

require.need("chainer")

import multibn.chainer_backend  # noqa: E402, F401
