"""Evidence: what was measured on a GPU, kept beside the source that it was measured on.

One file a GPU, ``evidence/<gpu>.json``. A section holds one kind of result with the digests of the
file groups that it depends on, so that anybody can tell without a GPU whether the result still
describes the present files. A section is written only by `record`, on a machine with that GPU.
"""

from cuverify.evidence.document import Status, evidence_files, load, statuses, validate
from cuverify.evidence.parts import part_names
from cuverify.evidence.recording import record
from cuverify.evidence.source_tree import source_root
from cuverify.evidence.views import report

__all__ = [
    "Status",
    "evidence_files",
    "load",
    "part_names",
    "record",
    "report",
    "source_root",
    "statuses",
    "validate",
]
