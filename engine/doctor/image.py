"""Check of the container image's own files; outside an image there is nothing to check."""

from __future__ import annotations

from collections.abc import Iterator

from engine.doctor.check import Check, Severity, judged
from engine.image import changed_files, image_labels


def check_image() -> Iterator[Check]:
    """Whether every file of the image is the one that its build sealed. A changed one makes a run open."""
    if not image_labels():
        return
    changed = changed_files()
    found = f"{len(changed)} differ, first {changed[0]}" if changed else "as sealed"
    remedy = "start from the image as it was built; a run in this one is open, and its record names the files"
    yield judged("image files", not changed, found, "as its build sealed them", remedy, bad=Severity.WARNING)
