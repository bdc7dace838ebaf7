"""One fixture per port: the backend to play a story on."""

import pytest

from . import harness


@pytest.fixture(params=sorted(harness.LEDGERS))
def ledgers(request):
    return harness.LEDGERS[request.param]


@pytest.fixture(params=sorted(harness.ARENAS))
def arenas(request):
    return harness.ARENAS[request.param]


@pytest.fixture(params=sorted(harness.PEERS))
def peers(request):
    return harness.PEERS[request.param]


@pytest.fixture(params=sorted(harness.TRANSPORTS))
def transports(request):
    return harness.TRANSPORTS[request.param]


@pytest.fixture(params=sorted(harness.OBJECTS))
def stores(request):
    return harness.OBJECTS[request.param]


@pytest.fixture(params=sorted(harness.TRAINERS))
def trainers(request):
    return harness.TRAINERS[request.param]
