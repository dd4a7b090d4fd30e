"""A network by the name of the function that builds it: one sentence for whatever is wrong with the name."""

from __future__ import annotations

import sys

import pytest
from torch import nn

from deepmrf.unary.own import code_name, own_network

CODE = """
from torch import nn
network = nn.Conv2d(3, 2, 1)
numbers = [1, 2]
def build(): return nn.Conv2d(3, 2, 1)
def needs(labels): return nn.Conv2d(3, labels, 1)
def number(): return 5
"""


@pytest.fixture
def mynet(tmp_path, monkeypatch):
    """A module `mynet` of the user's, and `broken` and `hungry`, which cannot be imported."""
    (tmp_path / "mynet.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "hungry.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("mynet", "broken", "hungry"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("mynet")
def test_modules_functions_and_names():
    network = nn.Conv2d(3, 2, 1)
    assert own_network(network) is network
    assert own_network(lambda: network) is network
    assert isinstance(own_network("mynet:build"), nn.Conv2d)
    assert own_network("mynet:network") is sys.modules["mynet"].network
    assert code_name("mynet:build") == "mynet:build"
    assert code_name(network) == "torch.nn.modules.conv.Conv2d"
    assert code_name(sys.modules["mynet"].build) == "mynet.build"


@pytest.mark.usefixtures("mynet")
@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("mynet", r"names no function: write package\.module:function"),
        ("mynet.py:build()", r"names no function"),
        ("nonet:build", r"no module nonet for .*: run in the folder that holds it"),
        ("mynet.part:build", r"no module mynet\.part|cannot be imported"),
        ("mynet:bild", r"has no function bild: did you mean mynet:build\?$"),
        ("mynet:needs", r"failed without arguments \(TypeError: .*labels.*give a function that needs none"),
        ("mynet:number", r"returned a int: let it return a torch\.nn\.Module"),
        ("mynet:numbers", r"is a list: pass a torch\.nn\.Module"),
        ("broken:build", r"broken cannot be imported \(ZeroDivisionError"),
        ("hungry:build", r"hungry cannot be imported .*no_such_package.*install what it needs"),
        (5, r"is a int: pass a torch\.nn\.Module"),
    ],
)
def test_what_is_wrong_is_one_sentence(network, message):
    with pytest.raises(ValueError, match=message) as error:
        own_network(network)
    assert "\n" not in str(error.value)
