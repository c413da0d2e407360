"""Collections of garbage in the programs that tests start; see ``short_programs/sitecustomize.py``."""

import gc

from support import jobs


def full_collections_of_a_program():
    """How many collections of the second generation come before a full one may."""
    return int(jobs.python("import gc; print(gc.get_threshold()[2])").stdout)


def test_they_are_spared_if_pytest_is_asked_to(request):
    is_asked = request.config.getoption("--short-programs")
    assert full_collections_of_a_program() == (1000 if is_asked else gc.get_threshold()[2])


def test_not_where_the_end_of_a_program_is_tested(full_collections):
    assert full_collections_of_a_program() == gc.get_threshold()[2]
