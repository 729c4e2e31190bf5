"""Finding data that does not ship with the package: traces and golden vectors."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "CUVERIFY_DATA"
"""Environment variable that names the folder of the data sets, or that of one of them."""


def find_data(data_set: str, file: str) -> Path | None:
    """Return where a file of a data set lies, if it is at hand.

    Where the environment variable ``CUVERIFY_DATA`` is set, only the folder that it names is looked
    into, and its subfolder with the data set's name before it. Otherwise it is ``.data`` in a
    checkout.

    Parameters
    ----------
    data_set : str
        Name of the data set's folder, such as ``azure-llm-2023``.
    file : str
        Name of the file in it.

    Returns
    -------
    pathlib.Path or None
    """
    named = os.environ.get(VARIABLE)
    if named:
        folders = [Path(named) / data_set, Path(named)]
    else:
        checkout = Path(__file__).resolve().parent.parent
        folders = [checkout / ".data" / data_set]
    for folder in folders:
        if (folder / file).is_file():
            return folder / file
    return None
