import harness
from trials import judge, pytest_terminal_summary  # noqa: F401


def pytest_configure(config):
    """Those marked slow belong to all trials."""
    config.option.all |= harness.ALL
