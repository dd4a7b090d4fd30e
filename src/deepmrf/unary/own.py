"""Networks of the user's own: a module, a function that builds one, or the name of such a function as text.

own_network(net)                          the module itself
own_network(build)                        build()
own_network("package.module:function")    imports the module, which runs its code, and calls the function
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from difflib import get_close_matches

from torch import nn

OwnNetwork = nn.Module | Callable[[], nn.Module] | str


def own_network(network: OwnNetwork) -> nn.Module:
    """Return the module that was passed, or that the function returns; one sentence says what else went wrong."""
    if isinstance(network, nn.Module):
        return network
    name = network if isinstance(network, str) else getattr(network, "__qualname__", repr(network))
    build = _import(network) if isinstance(network, str) else network
    if isinstance(build, nn.Module):
        return build
    if not callable(build):
        raise ValueError(f"network={name} is a {type(build).__name__}: pass a torch.nn.Module, or what builds one.")
    try:
        module = build()
    except Exception as error:
        raise ValueError(
            f"{name} failed without arguments ({type(error).__name__}: {_line(error)}): "
            "give a function that needs none and returns the network."
        ) from error
    if not isinstance(module, nn.Module):
        raise ValueError(f"{name} returned a {type(module).__name__}: let it return a torch.nn.Module.")
    return module


def code_name(network: OwnNetwork) -> str:
    """Where the code of a network is: "package.module:function" as it was passed, or the module's class."""
    if isinstance(network, str):
        return network
    kind = type(network) if isinstance(network, nn.Module) else network
    return f"{kind.__module__}.{getattr(kind, '__qualname__', type(kind).__qualname__)}"


def _import(text: str) -> object:
    """The object that "package.module:function" names."""
    module_name, colon, name = text.partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise ValueError(f"network={text!r} names no function: write package.module:function, such as mynet:build.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):  # of another import inside it
            raise ValueError(f"{module_name} cannot be imported ({_line(error)}): install what it needs.") from error
        raise ValueError(
            f"There is no module {module_name} for the network {text}: run in the folder that holds it, or install it."
        ) from error
    except Exception as error:
        raise ValueError(
            f"{module_name} cannot be imported ({type(error).__name__}: {_line(error)}): mend it, then try again."
        ) from error
    if not hasattr(module, name):
        near = get_close_matches(name, dir(module), 1)
        guess = f"did you mean {module_name}:{near[0]}?" if near else "check the name."
        raise ValueError(f"{module_name} has no function {name}: {guess}")
    result: object = getattr(module, name)
    return result


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
