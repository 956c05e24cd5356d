"""A test with the marker's arguments that MARKER has."""

import json
import os

import pytest

given = json.loads(os.environ["MARKER"])


@pytest.mark.ranks(*given[0], **given[1])
def test():
    raise AssertionError
