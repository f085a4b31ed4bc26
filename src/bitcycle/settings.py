"""Declaration of settings: type, default, help text and bounds in one place.

A dataclass derived from `Settings` is the Hydra schema of its configuration group and the source of `python train.py --help`; it
validates a run's configuration and determines which settings enter the run's name.
"""

import dataclasses
import difflib
import hashlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from numbers import Integral
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from bitcycle.errors import EXIT_WRONG_CONFIGURATION

MISSING = "???"
MOST_LISTED = 200
"""Most names that an error message lists."""


class SettingError(ValueError):
    """An invalid setting; the message names the field, the value, the problem and the remedy."""

    kind, exit_code = "wrong configuration", EXIT_WRONG_CONFIGURATION

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        self.field, self.value, self.problem, self.remedy = field, value, problem, remedy
        super().__init__(field, value, problem, remedy)

    def __str__(self) -> str:
        value = "null" if self.value is None else self.value
        return f"{self.field}={value}: {self.problem}. Remedy: {self.remedy}."

    def within(self, group: str) -> "SettingError":
        """The same error with the full name of its field, `q_min` -> `schedule.q_min`."""
        return SettingError(f"{group}.{self.field}" if group else self.field, self.value, self.problem, self.remedy)


def setting(
    default: Any,
    help: str,
    *,
    choices: Iterable[str] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    affects_result: bool = True,
    content: bool = False,
    unused: bool = False,
    used_by: Sequence[str] | None = None,
    unnamed: Any = MISSING,
) -> Any:
    """Declare one field of a `Settings` dataclass.

    Args:
        default: default value; lists and other mutable values are copied for each instance.
        help: one sentence for `--help`, with the paper's section if a paper fixes the value.
        choices: the allowed values.
        minimum, maximum: inclusive bounds of a number (or of each number of a list).
        affects_result: False if it cannot change a run's results (logging, paths); then it is not part of the run's
            name.
        content: for paths of weight files: the run's name depends on the content, not on the path.
        unused: accepted for the convenience of sweeps, but without effect; a single run warns if it is set.
        used_by: the values of the field `name` beside it with which it has an effect, if not all; a single run warns if it is
            set with another one.
        unnamed: the value that does not appear in a run's name, if not the default: what runs from before the setting, or
            before its default changed, were trained with. Their names thus remain theirs.
    """
    metadata = {
        "help": help,
        "choices": tuple(choices) if choices is not None else None,
        "minimum": minimum,
        "maximum": maximum,
        "affects_result": affects_result,
        "content": content,
        "unused": unused,
        "used_by": used_by,
        "unnamed": unnamed,
    }
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default of a declared field; MISSING if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default if field.default is not dataclasses.MISSING else MISSING


def unnamed_value(field: dataclasses.Field[Any]) -> Any:
    """The value of a declared field that does not appear in a run's name: `unnamed`, or the default."""
    declared = field.metadata.get("unnamed", MISSING)
    return default_of(field) if declared == MISSING else declared


def nearest(word: str, known: Iterable[str]) -> str:
    """A remedy for a misspelled word: the closest known word, ignoring case, then all of them, or their number.

    Swapped letters come first: difflib finds RHT as close to RTV as to RTH.

    >>> nearest("rth", ["CR", "RTH"])
    "did you mean 'RTH'? Known: CR, RTH"
    >>> nearest("RHT", ["RTH", "RTV"])
    "did you mean 'RTH'? Known: RTH, RTV"
    """
    known = sorted(known)
    by_lower_case = {name.lower(): name for name in known}
    swapped = [name for name in by_lower_case if sorted(name) == sorted(word.lower())]
    close = swapped or difflib.get_close_matches(word.lower(), by_lower_case, n=1, cutoff=0.5)
    listed = ", ".join(known) if len(known) <= MOST_LISTED else f"{len(known)} names"
    return f"did you mean '{by_lower_case[close[0]]}'? Known: {listed}" if close else f"use one of: {listed}"


@dataclasses.dataclass
class Settings:
    """Base of all configuration dataclasses; checks types, choices and bounds when constructed. Raises SettingError for a
    value of the wrong type, or outside its choices or bounds."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Fields redeclared with only a value inherit help text, choices and bounds from the base class."""
        super().__init_subclass__(**keywords)
        for name in inspect.get_annotations(cls).keys() & cls.__dict__.keys() & cls.__dataclass_fields__.keys():
            inherited, value = cls.__dataclass_fields__[name], cls.__dict__[name]
            if inherited.metadata and not isinstance(value, dataclasses.Field):
                setattr(cls, name, dataclasses.field(default=value, metadata=inherited.metadata))

    def __post_init__(self) -> None:
        types = _types(type(self))  # type: ignore[arg-type]
        for field in dataclasses.fields(self):
            value = _plain(getattr(self, field.name))
            setattr(self, field.name, value)
            if str(value).lower() in ("true", "false") and "true" in (field.metadata.get("choices") or ()):
                value = str(value).lower()  # YAML and Hydra parse these choices as booleans
                setattr(self, field.name, value)
            _check_type(field, value, types[field.name])
            _check_choice(field, value)
            _check_bounds(field, value)
        self.validate()

    def validate(self) -> None:
        """Check constraints between fields; override to add some."""

    def identity(self) -> dict[str, Any]:
        """Values that identify a run besides its settings: for a class of a user, the digest of its file and of those of the
        user's classes that it derives from, as changed code is another run."""
        others = {"bitcycle", *sys.stdlib_module_names}
        own = [kind for kind in type(self).__mro__ if kind.__module__.partition(".")[0] not in others]
        code = [Path(file).read_bytes() for file in dict.fromkeys(map(inspect.getfile, own))]
        return {"source": hashlib.sha256(b"".join(code)).hexdigest()} if code else {}

    def result_settings(self, digest: Callable[[str, str], str], prefix: str = "") -> dict[str, Any]:
        """Dotted name -> value, for all option names and for other settings that affect the result and are not default, or not
        what the default once was (`unnamed`); `digest` stands for the content of a field's file. Raises SettingError if the
        settings name something that cannot be read."""
        fields = [field for field in dataclasses.fields(self) if field.metadata.get("affects_result", True)]
        found: dict[str, Any] = {}
        for field in fields:
            if isinstance(value := getattr(self, field.name), Settings):
                found |= value.result_settings(digest, f"{prefix}{field.name}.")
        try:
            found |= {f"{prefix}{name}": value for name, value in self.identity().items()}
            for field in fields:  # names distinguish the options' classes
                value = getattr(self, field.name)
                if field.name == "name" or (not isinstance(value, Settings) and value != unnamed_value(field)):
                    found[prefix + field.name] = digest(value, field.name) if field.metadata.get("content") else value
        except SettingError as error:
            raise error.within(prefix.rstrip(".")) from None
        return found


S = TypeVar("S", bound=Settings)


def read_words(kind: type[S], given: Mapping[str, Any]) -> S:
    """Settings of a class from words of a command line, or values of a file. Raises SettingError for a setting that it does not
    have, or an invalid value."""
    types = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    for name, value in given.items():
        if name not in types:
            raise SettingError(name, value, "there is no such option", nearest(name, types))
    return kind(**{name: _value(value, types[name]) for name, value in given.items()})


def _value(given: Any, declared: str) -> Any:
    """Convert a value to the declared type: null, a list written as a,b or [a,b], a number, or text."""
    if given is None or given == "null":
        return None
    if "list" in declared:
        words = [part.strip() for part in given.strip("[]").split(",")] if isinstance(given, str) else given
        return [_value(word, declared.replace("list", "")) for word in words if word != ""]
    if "str" in declared:
        return str(given)
    try:
        value = json.loads(str(given))
    except json.JSONDecodeError:
        return given
    return float(value) if "float" in declared and isinstance(value, int) else value


_types = cache(get_type_hints)
_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a word",
    bool: "true or false",
    list: "a list, as [1,2]",
    type(None): "null",
}


def _check_type(field: dataclasses.Field[Any], value: Any, declared: Any) -> None:
    allowed = get_args(declared) if get_origin(declared) is Union else (declared,)
    if any(_is_of(value, kind) for kind in allowed):
        return
    kinds = [get_origin(kind) or kind for kind in allowed]
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingError(field.name, value, "is not a finite number", "use a finite number")
    remedy = "give " + " or ".join(_WORDS.get(kind, f"a {kind.__name__}") for kind in kinds)
    raise SettingError(field.name, value, "has the wrong type", remedy)


def _plain(value: Any) -> Any:
    """A value with whole numbers of other libraries, as NumPy's, as Python's."""
    if isinstance(value, list) and any(_is_foreign(entry) for entry in value):
        return [_plain(entry) for entry in value]
    return int(value) if _is_foreign(value) else value


def _is_foreign(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, int)


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value has a declared type; an int is a float, but a bool is neither."""
    if kind is Any:
        return True
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_is_of(entry, get_args(kind)[0]) for entry in value)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _check_choice(field: dataclasses.Field[Any], value: Any) -> None:
    choices = field.metadata.get("choices")
    for word in value if isinstance(value, list) else [value]:
        if choices is not None and word is not None and word not in choices:
            raise SettingError(field.name, word, "is not one of the allowed words", nearest(str(word), choices))


def _check_bounds(field: dataclasses.Field[Any], value: Any) -> None:
    minimum, maximum = field.metadata.get("minimum"), field.metadata.get("maximum")
    for number in value if isinstance(value, list) else [value]:
        if not isinstance(number, (int, float)) or isinstance(number, bool):
            continue
        if minimum is not None and not number >= minimum:
            raise SettingError(field.name, value, "is too small", f"use {minimum:g} or more")
        if maximum is not None and not number <= maximum:
            raise SettingError(field.name, value, "is too large", f"use {maximum:g} or less")
