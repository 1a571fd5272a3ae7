"""JSON as a record may hold it: no duplicate key, no NaN, no number that another reader would round."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from config.errors import InvalidRecord

MAX_INTEGER = 2**53  # RFC 8785: beyond it, a reader that holds numbers as doubles sees another one
REMEDY = "take the record as it was written; a file that was changed cannot be judged"
T = TypeVar("T")


def parse(data: bytes, where: str) -> Any:
    """The JSON value in UTF-8 bytes. `where` names the file, and the line if there are several, in the error.

    Raises:
        InvalidRecord: it is not JSON, or JSON that two readers could read differently.
    """
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_int=_integer,
            parse_float=_float,
        )
    except UnicodeDecodeError as error:
        raise InvalidRecord(f"{where} is not UTF-8 text (byte {error.start})", remedy=REMEDY) from None
    except RecursionError:
        raise InvalidRecord(f"{where} is nested too deeply", remedy=REMEDY) from None
    except ValueError as error:
        raise InvalidRecord(f"{where} is not JSON that can be judged: {error}", remedy=REMEDY) from None


def validate(model: TypeAdapter[T], value: Any, where: str) -> T:
    """A parsed value as the model says it must be.

    Raises:
        InvalidRecord: it does not fit; the error names the first three faults.
    """
    try:
        return model.validate_python(value)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc'])) or 'value'}: {fault['msg']}" for fault in error.errors()]
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise InvalidRecord(
            f"{where} does not fit its schema: {'; '.join(faults[:3])}{more}",
            remedy="see config/schemas; a record of a newer release needs a newer `sol verify`",
        ) from None


def parse_model(model: type[BaseModel], data: bytes, where: str) -> Any:
    """`parse` and `validate` in one, for a file that holds one object.

    Raises:
        InvalidRecord: as these do.
    """
    return validate(TypeAdapter(model), parse(data, where), where)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} appears twice")
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number in JSON")


def _integer(text: str) -> int:
    if len(text) > 17 or abs(int(text)) > MAX_INTEGER:
        raise ValueError(f"integer {text[:20]} is beyond 2**53")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text[:20]} is beyond a double")
    return value
