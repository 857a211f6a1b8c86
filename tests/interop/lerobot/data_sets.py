"""Data sets of LeRobot, written by hand in each layout as the library writes them."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

FPS, LENGTHS, TASKS = 10, [5, 7, 4], ["pick", "place"]
SIDE = 16

FEATURES: dict[str, Any] = {
    "observation.state": {"dtype": "float32", "shape": [3], "names": ["x", "y", "z"]},
    "observation.images.top": {"dtype": "image", "shape": [SIDE, SIDE, 3], "names": ["height", "width", "channels"]},
    "action": {"dtype": "float32", "shape": [2], "names": None},
    "next.reward": {"dtype": "float32", "shape": [1], "names": None},
    "next.done": {"dtype": "bool", "shape": [1], "names": None},
    "next.success": {"dtype": "bool", "shape": [1], "names": None},
    "matrix": {"dtype": "float64", "shape": [2, 2], "names": None},
    "words": {"dtype": "string", "shape": [1], "names": None},
    "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    "frame_index": {"dtype": "int64", "shape": [1], "names": None},
    "episode_index": {"dtype": "int64", "shape": [1], "names": None},
    "index": {"dtype": "int64", "shape": [1], "names": None},
    "task_index": {"dtype": "int64", "shape": [1], "names": None},
}


def columns(number: int) -> dict[str, Any]:
    """The steps of an episode by feature; images as frames of bytes."""
    rng, length = np.random.default_rng(number), LENGTHS[number]
    start = sum(LENGTHS[:number])
    done = np.zeros(length, bool)
    done[-1] = number != 1
    return {
        "observation.state": rng.normal(size=(length, 3)).astype("f4"),
        "observation.images.top": frames(number),
        "action": rng.normal(size=(length, 2)).astype("f4"),
        "next.reward": rng.normal(size=length).astype("f4"),
        "next.done": done,
        "next.success": rng.random(length) < 0.5,
        "matrix": rng.normal(size=(length, 2, 2)),
        "words": [f"word {t % 3}" for t in range(length)],
        "timestamp": (np.arange(length) / FPS).astype("f4"),
        "frame_index": np.arange(length),
        "episode_index": np.full(length, number),
        "index": np.arange(start, start + length),
        "task_index": np.full(length, number % 2),
    }


def frames(number: int) -> np.ndarray:
    """Images of an episode, each of one brightness that no other image has."""
    start = sum(LENGTHS[:number])
    values = 12 * np.arange(start, start + LENGTHS[number]) + 8
    return np.broadcast_to(values[:, None, None, None], (LENGTHS[number], SIDE, SIDE, 3)).astype(np.uint8)


def table(number: int, *, video: bool) -> pa.Table:
    made = {}
    for key, values in columns(number).items():
        if key == "observation.images.top":
            if not video:
                made[key] = pa.array([{"bytes": png(image), "path": "x.png"} for image in values])
        elif isinstance(values, np.ndarray) and values.ndim == 2:
            made[key] = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
        else:
            made[key] = pa.array(values.tolist() if isinstance(values, np.ndarray) and values.ndim > 2 else values)
    return pa.table(made)


def png(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    return file.getvalue()


def write_video(path: Path, numbers: Iterator[int] | list[int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=FPS, options={"g": "2", "crf": "5"})
        stream.height, stream.width, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        for number in numbers:
            for image in frames(number):
                file.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")))
        file.mux(stream.encode(None))


def info(version: str, *, video: bool) -> dict[str, Any]:
    features = json.loads(json.dumps(FEATURES))
    if video:
        features["observation.images.top"]["dtype"] = "video"
    return {
        "codebase_version": version,
        "robot_type": "so100",
        "total_episodes": len(LENGTHS),
        "total_frames": sum(LENGTHS),
        "total_tasks": len(TASKS),
        "chunks_size": 1000,
        "fps": FPS,
        "splits": {"train": f"0:{len(LENGTHS)}"},
        "features": features,
    }


def write_v30(root: Path, *, video: bool = False, files: int = 1) -> Path:
    """Version 3.0: episodes behind one another in a file, or in one file each of the first ones."""
    described = info("v3.0", video=video)
    described["data_path"] = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    described["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    homes = [min(number, files - 1) for number in range(len(LENGTHS))]
    for file in range(files):
        here = [number for number, home in enumerate(homes) if home == file]
        path = root / f"data/chunk-000/file-{file:03d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        with pq.ParquetWriter(path, table(0, video=video).schema) as writer:
            for number in here:
                writer.write_table(table(number, video=video))
        if video:
            write_video(root / f"videos/observation.images.top/chunk-000/file-{file:03d}.mp4", here)
    lines = []
    for number, length in enumerate(LENGTHS):
        start = sum(LENGTHS[:number])
        line = {"episode_index": number, "tasks": [TASKS[number % 2]], "length": length, "level": number * 0.5}
        line |= {"dataset_from_index": start, "dataset_to_index": start + length}
        line |= {"data/chunk_index": 0, "data/file_index": homes[number]}
        if video:
            before = sum(LENGTHS[k] for k in range(number) if homes[k] == homes[number]) / FPS
            key = "videos/observation.images.top"
            line |= {f"{key}/chunk_index": 0, f"{key}/file_index": homes[number]}
            line |= {f"{key}/from_timestamp": before, f"{key}/to_timestamp": before + length / FPS}
        lines.append(line)
    folder = root / "meta/episodes/chunk-000"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(lines), folder / "file-000.parquet")
    pq.write_table(pa.table({"task_index": [0, 1], "__index_level_0__": TASKS}), root / "meta/tasks.parquet")
    (root / "meta/stats.json").write_text(json.dumps({"action": {"mean": [1.0, 2.0]}}))
    (root / "meta/info.json").write_text(json.dumps(described))
    return root


def write_v21(root: Path, *, video: bool = False) -> Path:
    """Version 2.1: a file an episode, and lines of JSON."""
    described = info("v2.1", video=video)
    described["data_path"] = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    described["video_path"] = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    (root / "data/chunk-000").mkdir(parents=True)
    (root / "meta").mkdir()
    for number in range(len(LENGTHS)):
        pq.write_table(table(number, video=video), root / f"data/chunk-000/episode_{number:06d}.parquet")
        if video:
            write_video(root / f"videos/chunk-000/observation.images.top/episode_{number:06d}.mp4", [number])
    lines = [
        {"episode_index": number, "tasks": [TASKS[number % 2]], "length": length, "level": number * 0.5}
        for number, length in enumerate(LENGTHS)
    ]
    tasks = [{"task_index": number, "task": text} for number, text in enumerate(TASKS)]
    for name, rows in (("episodes", lines), ("tasks", tasks)):
        (root / f"meta/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "meta/info.json").write_text(json.dumps(described))
    return root
