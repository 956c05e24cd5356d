"""What the tests of this folder share."""

from collections.abc import Iterator

import pytest

import suite


@pytest.fixture(scope="session")
def forks() -> Iterator[suite.Forks]:
    """The Python whose forks are the ranks: PyTorch takes seconds to import."""
    made = suite.Forks()
    yield made
    made.close()
