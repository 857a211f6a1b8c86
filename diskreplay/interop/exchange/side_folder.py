"""Side folders: earlier releases kept in them what a format could not hold. An import names these values, no more."""

import os
from collections.abc import Mapping
from pathlib import Path

from diskreplay import FormatError, Schema
from diskreplay.interop.exchange.episode_data import HIDDEN, PRIORITY, Json
from diskreplay.interop.exchange.foreign import foreign, read_document
from diskreplay.interop.exchange.not_held import CUT, ENDS, FINAL_OBS, METADATA, NO_FINAL_OBS, NOTES, SCHEMA

_VALUES = FINAL_OBS, NO_FINAL_OBS, ENDS, CUT, NOTES, PRIORITY, HIDDEN
_NAME, _DOCUMENT, _VERSION = "diskreplay", "export.json", 1


def ignored_values(place: Path, format_name: str, schema: Schema, metadata: Mapping[str, Json]) -> tuple[Path, str]:
    """Return the side folder of a data set, and the names of its values, which the import of the data set lacks.

    Parameters
    ----------
    place : Path
        The file or folder that an export has made.
    format_name : str
        Its format, "npz".
    schema, metadata
        What the import finds without the side folder.

    Returns
    -------
    tuple of Path and str
        The names, with commas between them; empty if there is no side folder, or all its values are in the data set.

    Raises
    ------
    FormatError
        The export was interrupted, or the document of the side folder cannot be read.
    """
    for side in (place / _NAME, place.with_name(f"{place.name}.{_NAME}")):
        if not os.path.isfile(side / _DOCUMENT):  # False also for a name that is too long for the file system
            continue
        with foreign(side):
            document = read_document(side / _DOCUMENT)
            if document.get("version") != _VERSION:
                raise FormatError(f"{side / _DOCUMENT} is not of a version that this release reads; move {side} away")
            if not document["complete"]:
                raise FormatError(f"the export to {place} was interrupted; delete it and {side}, and export again")
            exported, noted = Schema.from_json(document["schema"]), document["metadata"]
            names = [name for name in document["not_held"] if name in (*_VALUES, *exported.leaves)]
            if noted and noted != metadata and noted["format"] != format_name:
                names.append(METADATA)
            if exported != schema:
                names.append(SCHEMA)
        return side, ", ".join(names)
    return place, ""
