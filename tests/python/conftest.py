"""Engines for tests, closed when their test ends."""

import pytest
import stand_in  # noqa: F401  first: it sets the environment up

# isort: split
from handmade import Engine


@pytest.fixture
def engines():
    made = []

    def make(*args, **options):
        made.append(Engine(*args, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
