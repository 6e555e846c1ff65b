"""A proxy in front of a simulated endpoint."""

import pytest
from proxied import export, serving
from scripted_endpoint import ScriptedEndpoint

from knobwise.agents import NumpyController
from knobwise.testbeds.simulated_endpoint import SimulatedEndpoint


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """The file of a controller."""
    path = tmp_path_factory.mktemp("exported") / "controller.npz"
    export(path)
    return path


@pytest.fixture(scope="session")
def controller(exported):
    return NumpyController.load(exported)


@pytest.fixture(scope="session")
def endpoint():
    with SimulatedEndpoint(delay=0) as running:
        yield running


@pytest.fixture(scope="module")
def scripted():
    with ScriptedEndpoint() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def served(exported, endpoint, tmp_path_factory):
    """A server that follows no drift, so that what it decides is known; it knows a further host."""
    folder = tmp_path_factory.mktemp("served")
    words = f"checkpoint={exported}", f"endpoint={endpoint.url}", "tracker=false", "timeout_s=1"
    with serving(folder, *words, "max_body_mb=1") as client:
        client.log = folder / "served"
        yield client
