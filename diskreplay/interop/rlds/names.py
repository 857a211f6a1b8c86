"""Names of RLDS, and which of its features holds which leaf of a schema."""

from diskreplay import Schema, SchemaError
from diskreplay.interop.exchange.episode_data import EXTRA, OBS, is_obs

NAME = "rlds"
STEPS, OBSERVATION, DISCOUNT, STEP_DISCOUNT = "steps/", "observation", "discount", "step_discount"
FIRST, LAST, TERMINAL = "is_first", "is_last", "is_terminal"
FLAGS = (FIRST, LAST, TERMINAL)
INFO, FEATURES = "dataset_info.json", "features.json"


def is_at(name: str, above: str) -> bool:
    """Tell whether a name is another one, or one below it."""
    return name == above or name.startswith(f"{above}/")


def feature_names(schema: Schema) -> dict[str, str]:
    """Return the names of features by the paths of leaves; SchemaError where two have the same."""
    found: dict[str, str] = {}
    for path in schema.step_leaves:
        part, _, inside = path.partition("/")
        if part == OBS:
            found[path] = f"{STEPS}{OBSERVATION}{path.removeprefix(OBS)}"
        elif part == EXTRA:
            found[path] = f"{STEPS}{DISCOUNT if inside == STEP_DISCOUNT else inside}"
        else:
            found[path] = f"{STEPS}{path}"
    for path, name in found.items():
        inside = name.removeprefix(STEPS)
        if inside in FLAGS or (is_at(inside, OBSERVATION) and not is_obs(path)):
            raise SchemaError(f"the name of {path} is taken in a step of RLDS; give the field another name")
    return found
