"""Custom networks from the command line: any function that returns one, and the networks of timm."""

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from bitcycle.model.base import ModelOptions
from bitcycle.optional_imports import require
from bitcycle.presets import import_here
from bitcycle.settings import MISSING, SettingError, nearest, setting
from bitcycle.shapes import ImageShape


@dataclass
class CustomModel(ModelOptions):
    """A user-defined function or class: model=custom model.target=package.module:function model.arguments={width: 2}.

    It is called with `arguments` and with those fields of the data's shape (`bitcycle.shapes`) that it has parameters
    for, e.g. `channels`, `size` and `classes` of images (also as `in_channels` and `num_classes`). Modules are also
    searched in the current directory. The content of the module's file is part of the run's name.
    """

    takes = object
    target: str = setting(MISSING, "function or class that returns the network, as package.module:function")
    arguments: Any = setting(None, "arguments of the target, as {width: 2}")

    def validate(self) -> None:
        if self.arguments is not None and not isinstance(self.arguments, dict):
            raise SettingError("arguments", self.arguments, "is not a mapping", "write it as {width: 2}")

    def check(self, shape: Any) -> None:
        parameters = inspect.signature(self._function()).parameters
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        unknown = next((name for name in self.arguments or () if name not in parameters), None)
        if unknown is not None and not takes_any:
            problem = f"{self.target} has no such parameter"
            raise SettingError("arguments", unknown, problem, nearest(unknown, parameters))
        needed = [name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty]
        given = {*_known(shape), *(self.arguments or ())}
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        lacking = [name for name in needed if name not in given and parameters[name].kind not in variable]
        if lacking:
            problem = f"{self.target} needs {' and '.join(lacking)}"
            raise SettingError("arguments", self.arguments, problem, f"set model.arguments={{{lacking[0]}: ...}}")

    def identity(self) -> dict[str, Any]:
        """Digest of the file that defines the network: a changed network is a different run."""
        function: Any = inspect.unwrap(self._function())  # a decorator may lie elsewhere
        if not (inspect.isfunction(function) or inspect.isclass(function)):  # an object, as of functools.partial
            function = import_here(self.target.partition(":")[0])
        file = inspect.getsourcefile(function)
        return {"source": hashlib.sha256(Path(file).read_bytes()).hexdigest()} if file else {}

    def build(self, shape: Any) -> nn.Module:
        function = self._function()
        parameters = inspect.signature(function).parameters
        taken = {name: value for name, value in _known(shape).items() if name in parameters}
        model = function(**taken | (self.arguments or {}))
        if not isinstance(model, nn.Module):
            problem = f"returns an object of type {type(model).__name__}"
            remedy = "name a function or class that returns a torch.nn.Module"
            raise SettingError("target", self.target, problem, remedy)
        if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
            remedy = "give the sizes of its layers, or let it compute a batch of zeros before it is returned"
            raise SettingError(
                "target", self.target, "returns a network with lazy layers, which have no weights yet", remedy
            )
        return model

    def _function(self) -> Callable[..., Any]:
        module, _, name = self.target.partition(":")
        if not name:
            raise SettingError("target", self.target, "names no function", "write package.module:function")
        if module.startswith(".") or module.endswith(".py") or "/" in module:
            remedy = f"write {Path(module).stem or 'module'}:{name}, and run the command in the folder of the file"
            raise SettingError("target", self.target, f"{module} is not the name of a module", remedy)
        try:
            found = import_here(module)
        except ImportError as error:
            remedy = "run the command in the folder of the module, or install the module"
            raise SettingError("target", self.target, f"cannot be imported: {error}", remedy) from error
        function: Callable[..., Any] | None = getattr(found, name, None)
        if isinstance(function, nn.Module):
            remedy = "name a function or class that returns one, which is called for each run"
            raise SettingError("target", self.target, "is a network itself", remedy)
        if not callable(function):
            names = [
                other for other, value in vars(found).items() if callable(value) and not isinstance(value, nn.Module)
            ]
            remedy = nearest(name, names)
            raise SettingError("target", self.target, f"{module} has no function of this name", remedy)
        return function


def _known(shape: Any) -> dict[str, Any]:
    """What a network may be told about the data: the fields of their shape, and other names of those of images."""
    others = {"num_classes": shape.classes, "in_channels": shape.channels} if isinstance(shape, ImageShape) else {}
    return shape._asdict() | others


@dataclass
class TimmModel(ModelOptions):
    """An image network of timm: model=timm model.architecture=resnet10t; randomly initialised."""

    architecture: str = setting(MISSING, "name of the network in timm")

    def check(self, shape: ImageShape) -> None:
        timm = require("timm", "timm")
        if not timm.is_model(self.architecture):
            remedy = f"{nearest(self.architecture, timm.list_models())}; `timm.list_models()` lists all"
            raise SettingError("architecture", self.architecture, "timm has no such network", remedy)

    def build(self, shape: ImageShape) -> nn.Module:
        timm = require("timm", "timm")
        options = {"num_classes": shape.classes, "in_chans": shape.channels}
        try:
            model: nn.Module = timm.create_model(self.architecture, img_size=shape.size, **options)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            model = timm.create_model(self.architecture, **options)
        return model
