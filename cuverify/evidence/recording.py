"""Measure a part on the GPU at hand and merge it into that GPU's evidence file."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cuverify.errors import EvidenceError
from cuverify.evidence import gpu as device
from cuverify.evidence.document import FOLDER, SCHEMA, digests, load, validate
from cuverify.evidence.parts import find_part, part_names
from cuverify.evidence.source_tree import source_root
from cuverify.files import locked, write_atomically
from cuverify.report import plain


def record(
    part: str, *, root: Path | None = None, options: Mapping[str, Any] | None = None
) -> Path:
    """Measure one part on this machine's GPU and merge it into the GPU's evidence file.

    Other sections of the file stay as they are, also those that another process records meanwhile.
    Nothing is written unless the whole part ran.

    Parameters
    ----------
    part : str
        One of `cuverify.evidence.part_names`.
    root : Path, optional
        The source tree; found by `source_root` when absent.
    options : mapping, optional
        What the part's run takes by name, see `cuverify.evidence.parts.Part.options`.

    Returns
    -------
    Path
        The evidence file.

    Raises
    ------
    DeviceError
        There is no CUDA device.
    EvidenceError
        The part is unknown, did not run, files changed meanwhile, or the present file is malformed.
    """
    if part not in part_names():
        raise EvidenceError(f"part {part!r} is unknown; there are {', '.join(part_names())}")
    rules, options = find_part(part), dict(options or {})
    for name in options.keys() - set(rules.options):
        raise EvidenceError(f"part {part!r} takes no {name}")
    root = source_root() if root is None else root
    gpu = device.gpu_name()
    path = root / FOLDER / f"{device.slug(gpu)}.json"
    # read first: a malformed file must not cost a run
    document: dict[str, Any] = {"schema": SCHEMA, "gpu": gpu, "sections": {}}
    if path.exists():
        document = load(path)
    if document["gpu"] != gpu:
        raise EvidenceError(f"{path} describes {document['gpu']!r}, and this machine has {gpu!r}")

    before = digests(root, part)
    started = time.monotonic()
    command, data = rules.record(root, **options)
    seconds = time.monotonic() - started
    changed = [group for group, value in digests(root, part).items() if value != before[group]]
    if changed:
        raise EvidenceError(f"{', '.join(changed)} changed during the run: nothing was recorded")

    from cuverify import env

    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    section = {
        "digests": before,
        "run": {"date": now.isoformat(), "command": command, "seconds": round(seconds, 1)},
        "versions": env.inspect().versions,
        "data": plain(data, part),
    }
    problems = validate({"schema": SCHEMA, "gpu": gpu, "sections": {part: section}})
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise EvidenceError(f"the run of {part!r} gave no valid section:\n{listed}")
    path.parent.mkdir(exist_ok=True)
    with locked(path):
        if path.exists():
            document = load(path)  # other parts may have been recorded meanwhile
        sections = {**document["sections"], part: section}
        document["sections"] = dict(sorted(sections.items()))
        write_atomically(
            path, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        )
    if rules.written is not None:
        rules.written(root)
    return path
