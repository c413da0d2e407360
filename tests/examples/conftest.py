"""Programs of several tests in one job; see ``example_programs.Jobs``."""

import pytest


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "runs(num_ranks, *commands): programs of examples/ that the test asks `jobs` for"
    )


@pytest.fixture(scope="session")
def jobs(request, tmp_path_factory):
    """The jobs in which the examples of all chosen tests run."""
    from example_programs import Jobs

    return Jobs(request.session.items, tmp_path_factory.mktemp("examples"))
