"""`dataset.json`: the description of a data set in one of diskreplay's own formats."""

import json
from pathlib import Path

from diskreplay import FormatError, Schema, StoreNotFound
from diskreplay.interop.exchange.exporting import Plan
from diskreplay.interop.exchange.foreign import read_document
from diskreplay.interop.exchange.importing import Given, Source

_FILE, _VERSION = "dataset.json", 1


class DescribedSource(Source):
    """A data set in one of diskreplay's own formats."""

    schema: Schema

    def __init__(self, given: Given) -> None:
        super().__init__(given)
        path = self.place / _FILE
        try:
            document = read_document(path)
        except FileNotFoundError:
            raise StoreNotFound(
                f"{self.place} is not a whole data set of the format {self.format}: it has no {_FILE}"
            ) from None
        if document.get("version") != _VERSION:
            raise FormatError(f"{path} is not of a version that this release reads; update diskreplay")
        if document.get("format") != self.format:
            raise FormatError(f"{self.place} is a data set of the format {document.get('format')}, not {self.format}")
        self.schema = Schema.from_json(document.get("schema"))
        self.leaves, self.names = self.schema.leaves, {path: path for path in self.schema.leaves}
        self.episodes, self.steps = int(document["episodes"]), int(document["steps"])
        self.metadata = dict(document["metadata"])


def is_described(folder: Path) -> bool:
    return (folder / _FILE).exists()


def describe(plan: Plan, format_name: str) -> None:
    """Write `dataset.json` as the last file: a folder without this file is not a complete data set."""
    document = {
        "format": format_name,
        "version": _VERSION,
        "episodes": plan.episodes,
        "steps": plan.steps,
        "schema": plan.schema.to_json(),
        "metadata": dict(plan.metadata),
    }
    (plan.path / _FILE).write_text(json.dumps(document, indent=1))
