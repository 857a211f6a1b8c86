"""`diskreplay frames`: saves the images of an episode as a strip or an animation."""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.cli import console, text
from diskreplay.cli.look.show import EpisodeNumber, IsId, Steps, as_slice, chosen_leaves, find_episode, row_count
from diskreplay.pictures import as_images, gif, is_image, mp4, png, spread, strip
from diskreplay.reading.episodes import Episode
from diskreplay.schema.schema import Schema

MOST_FPS_OF_GIF = 50  # browsers do not play a GIF faster than this
MOST_FRAMES = 64  # the maximum number of frames of a strip without --steps


def frames(
    path: console.StorePath,
    episode: EpisodeNumber,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file: .png (a strip), .gif or .mp4.")],
    field: Annotated[
        str | None, typer.Option("--field", metavar="FIELD", help="The field with the images; default: the first one.")
    ] = None,
    steps: Steps = None,
    is_id: IsId = False,
    fps: Annotated[
        float,
        typer.Option(
            "--fps", min=0.1, max=240, callback=console.not_nan, help="Frames a second; at most 50 for a .gif."
        ),
    ] = 15.0,
    scale: Annotated[int, typer.Option("--scale", min=1, max=32, help="Enlarge each pixel to N x N pixels.")] = 1,
) -> None:
    """Save the images of an episode: a PNG with the frames in rows of eight, an animated GIF, or an MP4.

    An image is a field of shape (height, width), or has channels as a first or last axis. If there are neither 1 nor 3
    channels, they are taken as stacked frames, and the last frame is shown. uint8 values are shown unchanged; other
    values are scaled so that the smallest is black and the largest white. A strip of a long episode has 64 frames,
    evenly spaced; --steps chooses others. A GIF has at most 256 colours a frame; an MP4 is H.264, with some loss. PNG
    and GIF need pillow: pip install "diskreplay[plot]". MP4 needs PyAV: pip install "diskreplay[video]".
    """
    if out.suffix not in (".png", ".gif", ".mp4"):
        raise typer.BadParameter(f"--out must end in .png, .gif or .mp4, not {out}")
    if out.suffix == ".gif" and fps > MOST_FPS_OF_GIF:
        raise typer.BadParameter(f"a GIF has at most {MOST_FPS_OF_GIF} frames a second, not --fps {fps:g}; use .mp4")
    part = slice(None) if steps is None else as_slice(steps)
    with dr.open(path) as store:
        found = store.episodes[find_episode(store.episodes, episode, is_id=is_id)]
        leaf = image_leaf(store.schema, field)
        images = as_images(_rows(found, leaf, part, steps is None and out.suffix == ".png"))
        images = images.repeat(scale, 1).repeat(scale, 2)
    if not len(images):
        raise typer.BadParameter(f"--steps {steps} selects no step of the {text.plural(len(found), 'step')}")
    if out.suffix == ".png":
        picture = png(strip(images))
    else:
        picture = (gif if out.suffix == ".gif" else mp4)(images, fps)
    console.save(out, picture)
    console.emit(f"saved {text.plural(len(images), 'frame')} of {text.clean(leaf)}  {text.clean(out)}")


def _rows(episode: Episode, leaf: str, part: slice, are_few: bool) -> NDArray[Any]:
    numbers = range(row_count(episode, leaf))[part]
    if are_few and len(numbers) > MOST_FRAMES:
        chosen = [numbers[at] for at in spread(len(numbers), MOST_FRAMES)]
        return np.concatenate([episode.rows(leaf, number, number + 1) for number in chosen])
    return episode.rows(leaf, numbers.start, max(numbers.start, numbers.stop))


def image_leaf(schema: Schema, name: str | None) -> str:
    """Return the path of the first field with images.

    If ``name`` is given, search only this field and the fields in it.
    """
    images = [path for path, leaf in schema.step_leaves.items() if is_image(leaf)]
    found = [path for path in images if name is None or path in chosen_leaves(schema, [name])]
    if not found:
        which = "no field of this store has" if name is None else f"{text.clean(name)} has no"
        known = f"; these have: {', '.join(map(text.clean, images))}" if images else ""
        raise typer.BadParameter(f"{which} images{known}")
    return found[0]
