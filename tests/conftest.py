"""What the test run must be able to do, and how it finds out."""

import pytest

from tests.helpers import require


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require",
        default="",
        help="comma-separated frameworks and launchers whose absence fails tests instead of "
        f"skipping them: {', '.join(require.PROBES)}",
    )


def pytest_configure(config: pytest.Config) -> None:
    require.set_required(name for name in config.getoption("--require").split(",") if name)
