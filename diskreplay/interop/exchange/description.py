"""`dataset.json`: the description of a data set in one of diskreplay's own formats."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from diskreplay import FormatError, Schema, StoreNotFound
from diskreplay.interop.exchange.episode_data import Json
from diskreplay.interop.exchange.exporting import Plan
from diskreplay.interop.exchange.foreign import read_document

_FILE, _VERSION = "dataset.json", 1


@dataclass(frozen=True)
class Description:
    schema: Schema
    episodes: int
    steps: int
    metadata: dict[str, Json]

    @staticmethod
    def is_in(folder: Path) -> bool:
        return (folder / _FILE).exists()

    @classmethod
    def read(cls, folder: Path, format_name: str) -> Self:
        path = folder / _FILE
        try:
            document = read_document(path)
        except FileNotFoundError:
            raise StoreNotFound(
                f"{folder} is not a whole data set of the format {format_name}: it has no {_FILE}"
            ) from None
        if document.get("version") != _VERSION:
            raise FormatError(f"{path} is not of a version that this release reads; update diskreplay")
        if document.get("format") != format_name:
            raise FormatError(f"{folder} is a data set of the format {document.get('format')}, not {format_name}")
        schema = Schema.from_json(document.get("schema"))
        return cls(schema, int(document["episodes"]), int(document["steps"]), dict(document["metadata"]))

    @classmethod
    def write(cls, plan: Plan, format_name: str) -> None:
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
