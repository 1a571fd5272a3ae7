"""The committed JSON Schemas are those of the models."""

from __future__ import annotations

import json

from config.schemas import FOLDER, schemas


def test_committed_schemas_equal_the_generated_ones() -> None:
    assert sorted(path.name for path in FOLDER.glob("*.json")) == sorted(schemas())
    for name, data in schemas().items():
        assert (FOLDER / name).read_bytes() == data, f"run `python -m config.schemas`: {name} is stale"


def test_schemas_refuse_unknown_keys() -> None:
    for name, data in schemas().items():
        schema = json.loads(data)
        objects = [schema, *schema.get("$defs", {}).values()]
        closed = [node for node in objects if node.get("type") == "object"]
        assert closed and all(node["additionalProperties"] is False for node in closed), name
