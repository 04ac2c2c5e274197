"""Engines for tests, closed when their test ends."""

import pytest
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
