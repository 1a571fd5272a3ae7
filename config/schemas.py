"""JSON Schemas of the run record, generated from the models.

`python -m config.schemas` writes them; a test compares them with what is committed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from config.lock import Lock
from config.record import MODELS

FOLDER = Path(__file__).resolve().parent / "schemas"


def schemas() -> dict[str, bytes]:
    """File name to bytes of every schema of the record's JSON files."""
    return {f"{name}.schema.json": _render(model) for name, model in {**MODELS, "lock": Lock}.items()}


def _render(model: Any) -> bytes:
    schema = TypeAdapter(model).json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return (json.dumps(schema, indent=1, sort_keys=True) + "\n").encode()


def main() -> None:
    """Write the schemas to config/schemas."""
    FOLDER.mkdir(exist_ok=True)
    for name, data in schemas().items():
        (FOLDER / name).write_bytes(data)


if __name__ == "__main__":
    main()
