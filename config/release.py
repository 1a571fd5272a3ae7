"""Write the lock of every target to config/locks, so that a record of this release stays checkable by digest.

`python -m config.release` adds the current locks and keeps those of earlier releases. `--prune` removes the others, for
the time before the first release, but for those that a record in benchmarks/records was made with. Run it after any
change of a target, a prompt or a recipe: a test asks for it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from config.errors import SolError
from config.lock import LOCKS, ROOT, lock_file_name, lock_json, resolve, target_names

RECORDS = ROOT.parent / "benchmarks" / "records"


def locks_of_records(records: Path = RECORDS) -> set[str]:
    """Names of the locks that the records in a folder were made with or differ from.

    Raises:
        OSError, ValueError, KeyError: a lock.json cannot be read.
    """
    locks = [json.loads(path.read_text("utf-8")) for path in sorted(records.glob("*/lock.json"))]
    return {f"{lock['target']}-{lock[key][:12]}.json" for lock in locks for key in ("digest", "base_digest")}


def write_locks(folder: Path = LOCKS, *, prune: bool = False, records: Path = RECORDS) -> tuple[list[str], list[str]]:
    """Write each target's lock to `folder`. Pruning spares what the records in `records` were made with.

    Returns:
        The names of the files written anew, and of those removed.

    Raises:
        config.errors.UsageError: a target or its recipe is faulty.
        OSError: the folder cannot be written.
    """
    current = {lock_file_name(lock): lock_json(lock) for lock in map(resolve, target_names())}
    folder.mkdir(exist_ok=True)
    present = {path.name: path for path in folder.glob("*.json")}
    written = [name for name, data in current.items() if name not in present or present[name].read_bytes() != data]
    for name in written:
        (folder / name).write_bytes(current[name])
    removed = sorted(present.keys() - current.keys() - locks_of_records(records)) if prune else []
    for name in removed:
        present[name].unlink()
    return written, removed


def main() -> int:
    """Entry of `python -m config.release`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m config.release", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prune", action="store_true", help="remove the locks of no current target")
    prune = parser.parse_args().prune
    try:
        written, removed = write_locks(prune=prune)
    except SolError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    for sign, names in (("+", written), ("-", removed)):
        for name in names:
            print(f"{sign} {name}")
    print(f"{len(written)} written, {len(removed)} removed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
