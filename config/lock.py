"""From a target's TOML file to a lock: every value explicit, a canonical form, a SHA-256 digest.

The digest is taken over the target's values, the prompt's text and the recipe's digest. It is the same on every machine
and for every order of keys. An override is a new lock with another digest and the list of what differs; such a run is
open, never locked.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import rfc8785
from pydantic import Field, ValidationError

from config.canonical import sha256_bytes, sha256_file, sha256_json
from config.errors import UsageError
from config.replays import expand
from config.schema import ARMS, Model, Name, Sha256, Target

ROOT = Path(__file__).resolve().parent
TARGETS = ROOT / "targets"
PROMPTS = ROOT / "prompts"
LOCKS = ROOT / "locks"
RECIPE_FILES = ("image.toml", "requirements.lock")
UNLOCKED = ("defaults", "title", "notes")
LATER: Mapping[tuple[str, ...], Any] = {
    ("cache", "replay"): [],
    ("offload", "mapped"): False,
    ("output",): "mp4",
    ("warmup", "compute_last"): False,
}
"""Keys younger than the first locks, with what those did: in a lock only where they differ, so that those locks keep
their digests."""


class Recipe(Model):
    """What an image is made from. A file that does not exist yet is null: the recipe is incomplete, and says so."""

    image: Name
    files: dict[str, Sha256 | None]
    sha256: Sha256


class Override(Model):
    """One value that differs from the target's own."""

    key: str
    locked: Any
    value: Any


class Lock(Model):
    """A resolved target. `values` is everything that the digest covers."""

    schema_version: int = Field(default=1, ge=1, le=1)
    target: Name
    digest: Sha256
    base_digest: Sha256 = Field(description="the digest of the target without overrides")
    overrides: tuple[Override, ...] = Field(default=(), strict=False)
    values: dict[str, Any]

    @property
    def resolved(self) -> Target:
        """The values as the typed target (titles, notes and defaults are not part of a lock)."""
        values = {key: value for key, value in self.values.items() if key != "recipe_files"}
        return Target.model_validate({**values, "title": "", "defaults": _lock_defaults(values)})

    @property
    def recipe(self) -> Recipe:
        """The image recipe that the digest covers."""
        return Recipe.model_validate(self.values["recipe_files"])

    def recomputed_digest(self) -> str:
        """The digest as the values give it; equal to `digest` unless somebody changed one of the two."""
        return sha256_json(self.values)


def _lock_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"arms": [arm for arm in ARMS if arm in values["arms"]], "samples": 1}


def target_names() -> list[str]:
    """Names of the targets that ship, sorted."""
    return sorted(path.stem for path in TARGETS.glob("*.toml"))


def prompt_names() -> list[str]:
    """Names of the prompts that ship, sorted."""
    return sorted(path.stem for path in PROMPTS.glob("*.txt"))


def recipes_root() -> Path:
    """The folder of image recipes: `images/` of a checkout, or its copy inside an installed distribution."""
    checkout = ROOT.parent / "images"
    return checkout if checkout.is_dir() else ROOT / "_recipes"


def nearest(name: str, known: Sequence[str]) -> str:
    """A hint that names the closest known name, or lists them all."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def read_recipe(image: str) -> Recipe:
    """Digest the recipe files of one image.

    Raises:
        UsageError: there is no such image.
    """
    folder = recipes_root() / image
    if not folder.is_dir():
        known = sorted(path.name for path in recipes_root().glob("*") if path.is_dir())
        raise UsageError(f"image recipe {image!r} does not exist", remedy=nearest(image, known))
    files = {name: sha256_file(folder / name) if (folder / name).is_file() else None for name in RECIPE_FILES}
    return Recipe(image=image, files=files, sha256=sha256_json(files))


def read_prompt(name: str) -> str:
    """The text of a shipped prompt, without a trailing newline.

    Raises:
        UsageError: there is no such prompt.
    """
    path = PROMPTS / f"{name}.txt"
    if name not in prompt_names():
        raise UsageError(f"prompt {name!r} does not exist", remedy=nearest(name, prompt_names()))
    return path.read_bytes().decode("utf-8").removesuffix("\n")


def load_target(name: str, overrides: Sequence[str] = ()) -> Target:
    """Read and check one target file, with `section.key=value` overrides applied before the check.

    Raises:
        UsageError: the target, a key or a value is not one that exists.
    """
    return _validated(name, _expand_replay(_apply(_read(name), overrides)))


def resolve(name: str, overrides: Sequence[str] = ()) -> Lock:
    """Resolve a target to its lock.

    Args:
        name: a target of `target_names()`.
        overrides: `section.key=value` each; the value is TOML, or taken as a string where TOML cannot read it.

    Raises:
        UsageError: the target, a key or a value is not one that exists.
    """
    base = _values(load_target(name))
    values = _values(load_target(name, overrides)) if overrides else base
    differences = tuple(_differences(base, values))
    return Lock(target=name, digest=_digest(values), base_digest=_digest(base), overrides=differences, values=values)


def shipped_locks() -> dict[str, Lock]:
    """Every lock that ships, of this release and earlier ones, by digest."""
    locks = (Lock.model_validate_json(path.read_bytes()) for path in sorted(LOCKS.glob("*.json")))
    return {lock.digest: lock for lock in locks}


def lock_json(lock: Lock) -> bytes:
    """The bytes of lock.json: readable, and stable."""
    return (json.dumps(lock.model_dump(mode="json"), indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def lock_file_name(lock: Lock) -> str:
    """The name under which a lock ships in config/locks."""
    return f"{lock.target}-{lock.digest[:12]}.json"


def _read(name: str) -> dict[str, Any]:
    if name not in target_names():
        raise UsageError(f"target {name!r} does not exist", remedy=nearest(name, target_names()))
    try:
        tree = tomllib.loads((TARGETS / f"{name}.toml").read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"target file {name}.toml is not TOML: {error}", remedy="restore the shipped file") from None
    if isinstance(tree.get("cache"), dict) and tree["cache"].get("replay", []) != []:
        raise UsageError(
            f"target file {name}.toml has cache.replay",
            needed="none: a list in place of the signals is for open runs",
            remedy="take it out of the file and type --set cache.replay=...",
        )
    return tree


def _expand_replay(tree: dict[str, Any]) -> dict[str, Any]:
    """A replayed list in its short or named form, written out in place; what a name means depends on the cache."""
    cache = tree.get("cache")
    value = cache.get("replay") if isinstance(cache, dict) else None
    if isinstance(value, str):
        tree["cache"]["replay"] = list(expand(value, str(tree["cache"].get("kind", ""))))
    elif isinstance(value, int) and not isinstance(value, bool):
        tree["cache"]["replay"] = [value]
    return tree


def _validated(name: str, raw: Mapping[str, Any]) -> Target:
    try:
        target = Target.model_validate(raw)
    except ValidationError as error:
        raise UsageError(
            f"target {name!r}: {describe(error)}", remedy=f"`sol print {name}` shows every key and value"
        ) from None
    if target.name != name:
        raise UsageError(f"target file {name}.toml calls itself {target.name!r}", remedy="make the two names equal")
    return target


def _values(target: Target) -> dict[str, Any]:
    values = target.model_dump(mode="json", exclude=set(UNLOCKED))
    request = values["request"]
    request["prompt_text"] = request["prompt_text"] or read_prompt(request["prompt"])
    digest = sha256_bytes(request["prompt_text"].encode())
    if request["prompt_sha256"] not in ("", digest):
        raise UsageError(
            f"prompt {request['prompt']!r} has SHA-256 {digest}",
            needed=f"request.prompt_sha256 = {request['prompt_sha256']}",
            remedy="set request.prompt_sha256 to the text's own digest, or leave it empty",
        )
    request["prompt_sha256"] = digest
    for (*tables, key), at_first in LATER.items():
        table = values
        for name in tables:
            table = table[name]
        if table[key] == at_first:
            del table[key]
    values["recipe_files"] = read_recipe(target.recipe).model_dump(mode="json")
    return values


def _digest(values: Mapping[str, Any]) -> str:
    try:
        return sha256_json(values)
    except rfc8785.CanonicalizationError as error:
        raise UsageError(
            f"a value has no canonical JSON form: {error}", needed="integers of at most 2**53 - 1 in magnitude"
        ) from None


def describe(error: ValidationError) -> str:
    """The faults of a target's validation error in one line, unknown keys with the nearest known name."""
    faults = error.errors()
    # A wrong name of a free table ("arms.cpu") is reported at "[key]"; what is wrong below it is of no interest.
    unknown = {fault["loc"][:-1] for fault in faults if fault["loc"][-1:] == ("[key]",)}
    return "; ".join(
        _describe_one(fault)
        for fault in faults
        if fault["loc"][-1:] == ("[key]",) or not any(fault["loc"][: len(name)] == name for name in unknown)
    )


def _describe_one(fault: Any) -> str:
    loc = [str(part) for part in fault["loc"] if part != "[key]"]
    shown, known = _walk(loc)
    key = ".".join(shown)
    if fault["type"] == "extra_forbidden" or "[key]" in fault["loc"]:
        return f"unknown key {key!r}; {nearest(loc[-1], known)}"
    if fault["type"] == "missing":
        return f"key {key!r} is missing"
    if fault["type"] == "value_error":
        return f"{key}: {fault['ctx']['error']}" if key else str(fault["ctx"]["error"])
    quote = fault["type"] == "string_type" and not isinstance(fault["input"], dict | list)
    hint = f"""; for a text write {key}='"{fault["input"]}"'""" if quote else ""
    return f"{key or 'target'}: {fault['msg']} (found {fault['input']!r}{hint})"


def _walk(loc: Sequence[str]) -> tuple[list[str], list[str]]:
    """Follow a fault's place through the schema: its parts as in a target file, and the names known beside the last.

    Where a table has several forms pydantic puts the chosen form's tag into the place; a file has no such level.
    """
    schema: dict[str, Any] = Target.model_json_schema()
    node: dict[str, Any] = schema
    shown: list[str] = []
    known: list[str] = []
    for part in loc:
        forms = node.get("discriminator", {}).get("mapping", {})
        if part in forms:
            node = schema["$defs"][forms[part].rsplit("/", 1)[1]]
            continue
        shown.append(part)
        known = sorted(node.get("properties", {})) or list(node.get("propertyNames", {}).get("enum", []))
        rest = node.get("additionalProperties")
        node = node.get("properties", {}).get(part, rest if isinstance(rest, dict) else {})
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
    return shown, known


_ASSIGNMENT = re.compile(r"^(?P<key>[A-Za-z_][\w-]*(?:\.[\w-]+)*)=(?P<value>.*)$", re.DOTALL)


def _apply(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Put overrides into a target's tables, in place."""
    for assignment in overrides:
        match = _ASSIGNMENT.match(assignment)
        if match is None:
            raise UsageError(
                f"override {assignment!r} is not of the form section.key=value", remedy="--set sol_attn.tau=0.5"
            )
        if not _is_unicode(assignment):
            raise UsageError(f"override {assignment!r} is not valid UTF-8", remedy="write the value in UTF-8")
        *sections, key = match["key"].split(".")
        if (first := [*sections, key][0]) in UNLOCKED:
            raise UsageError(
                f"override {assignment!r}: {first!r} is not part of a lock, so the override would do nothing",
                remedy="choose arms with --arm and the number of samples with --samples",
            )
        node = tree
        for section in sections:
            child = node.setdefault(section, {})
            if not isinstance(child, dict):
                raise UsageError(
                    f"override {assignment!r}: {section!r} is a value, not a section",
                    remedy="`sol print TARGET` shows the keys",
                )
            node = child
        value = _parse(match["value"])
        node[key] = match["value"] if sections == ["env"] and not isinstance(value, str) else value
        if sections == ["request"] and key in ("prompt", "prompt_text"):
            node["prompt_sha256"] = ""  # the digest follows the text that was asked for
            if key == "prompt":
                node.pop("prompt_text", None)
        if sections == ["request"] and key == "num_inference_steps" and isinstance(node[key], int):
            node["forwards"] = node[key] - 1  # follows from the steps; see Request
    return tree


def _parse(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except ValueError:  # TOMLDecodeError, or an integer too long for Python to convert
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of a command line that are not UTF-8 arrive as lone surrogates
        return False
    return True


def _differences(base: Any, values: Any, prefix: str = "") -> Iterator[Override]:
    if isinstance(base, dict) and isinstance(values, dict):
        for key in sorted({*base, *values}):
            yield from _differences(base.get(key), values.get(key), f"{prefix}.{key}" if prefix else key)
    elif base != values:
        yield Override(key=prefix, locked=base, value=values)
