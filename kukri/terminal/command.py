"""Commands whose options are declared in dataclasses, so that several commands can share them.

A field made by `option` or `argument` carries its flags and help; `command` turns each parameter that is such
a dataclass into the options of its fields. Annotations must not be postponed: typer reads them at each start.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import Field, field, fields, is_dataclass
from functools import cached_property
from importlib import import_module
from inspect import Parameter, Signature, signature
from typing import Annotated, Any

import typer
from typer.core import TyperCommand


def command(app: typer.Typer, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
    """Registers a function as a command of `app`; its parameters may be dataclasses of options.

    `name` is the function's unless given; `settings` are `typer.Typer.command`'s.
    """

    def register(function: Any) -> Any:
        app.command(name, cls=LightCommand, **settings)(expanded(function))
        return function

    return register


class LightParams:
    """Mixed into a command or a group: simple values are read by Python's types, not by pydantic.

    From 0.29 on typer reads every value by pydantic, whose import costs each start 80 ms. Nothing changes
    before 0.29, or if typer renames its private attribute: then each start takes longer.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of typer's command."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "_runtime_param", False) is None:
                param._runtime_param = _LightReader()
        return params


class LightCommand(LightParams, TyperCommand):
    """A command without pydantic."""


class _LightReader:
    """Reads the values of a parameter in place of typer 0.29, which reads what is not simple or is wrong."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        kind, info = param.type_descriptor.annotation, param.type_descriptor.parameter_info
        if kind in (str, int, float) and info.parser is None:
            with suppress(ValueError):
                read = kind(value)
                if (info.min is None or read >= info.min) and (info.max is None or read <= info.max):
                    return read
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param, ctx)


def expanded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with each parameter that is a dataclass replaced by keyword parameters for its fields.

    A start needs the options of one command. So a command's are made when typer asks for them, and a class
    whose declaration takes long may be named in quotes, with its module: it is imported then.
    """
    return _Expanded(function)


class _Expanded:
    """See `expanded`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def __call__(self, **values: Any) -> Any:
        for name, group in self._groups.items():
            values[name] = group(**{one.name: values.pop(one.name) for one in fields(group)})
        return self._function(**values)

    @cached_property
    def _groups(self) -> dict[str, Any]:
        """The dataclasses among the parameters, by name."""
        declared = {name: _declared(one) for name, one in signature(self._function).parameters.items()}
        return {name: hint for name, hint in declared.items() if is_dataclass(hint)}

    @cached_property
    def __signature__(self) -> Signature:
        parameters: list[Parameter] = []
        for name, parameter in signature(self._function).parameters.items():
            if name in self._groups:
                parameters += map(_as_parameter, fields(self._groups[name]))
            else:
                parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
        return Signature(parameters)

    @property
    def __annotations__(self) -> dict[str, Any]:  # type: ignore[override]
        return {name: one.annotation for name, one in self.__signature__.parameters.items()}


def _declared(parameter: Parameter) -> Any:
    """The annotation of a parameter, imported if it is a name."""
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    module, _, name = parameter.annotation.rpartition(".")
    return getattr(import_module(module), name)


def _as_parameter(one: Field[Any]) -> Parameter:
    annotation = Annotated[one.type, one.metadata["option"]]  # type: ignore[name-defined]
    return Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=annotation)


def option(
    help: str,
    *flags: str,
    default: Any = None,
    convert: Callable[[Any], Any] | None = None,
    **settings: Any,
) -> Any:
    """A dataclass field that is an option; `flags` and `settings` are `typer.Option`'s.

    Without flags the option is named like the field; with the default `...` it must be given. `given` passes
    on what `convert` makes of the value.
    """
    made = typer.Option(*flags, help=help, **settings)
    return field(default=default, metadata={"option": made, "convert": convert})


def argument(help: str, **settings: Any) -> Any:
    """A dataclass field that is an argument, None if it is left out; `settings` are `typer.Argument`'s."""
    return field(default=None, metadata={"option": typer.Argument(help=help, **settings), "convert": None})


def given(options: Any) -> dict[str, Any]:
    """The fields of a dataclass that the command line set: not None, not empty, no switch as it stood."""
    found: dict[str, Any] = {}
    for one in fields(options):
        value, convert = getattr(options, one.name), one.metadata["convert"]
        if value is not None and value != [] and not (value is False and one.default is False):
            found[one.name] = value if convert is None else convert(value)
    return found
