"""Fields cast exactly or refuse; schemas keep their leaves, survive JSON, and refuse what a folder cannot hold."""

import json
import pickle
import re

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings, strategies as st

from diskreplay import Field, FormatError, Schema, SchemaError

F32 = Field((), "float32")


def nested_schema() -> Schema:
    return Schema(
        obs={"image": Field((4, 4), "uint8"), "state": (Field(3, "float32"), {"deep": Field((), "bool")})},
        action=(Field((), "int64"), Field((2,), "float64")),
        extra={"log_prob": F32, "hidden": {"h": Field((2,), "float32"), "c": Field((2,), "float32")}},
        episode={"seed": Field((), "int64"), "task": Field((), "int8")},
    )


def test_a_field_normalises_its_shape_and_dtype():
    field = Field(3, ">f4")
    assert (field.shape, field.dtype, field.row_bytes) == ((3,), np.dtype("float32"), 12)
    assert field.dtype.byteorder == "="
    assert Field([np.int64(2), 3], np.uint8).shape == (2, 3)
    assert Field((), bool).row_bytes == 1
    assert Field((), float) == Field((), "float64") != Field((), "float64", {"type": "MultiBinary"})


@pytest.mark.parametrize(
    "dtype", ["complex64", "object", "S3", "U2", "datetime64[s]", "f4,f4", "float128", None, 3, "no"]
)
def test_a_field_refuses_a_dtype_that_the_format_does_not_know(dtype):
    with pytest.raises(SchemaError, match="dtype is one of bool, int8"):
        Field((), dtype)


@pytest.mark.parametrize("shape", [(-1,), (0,), (True,), (2.0,), "ab", None, (1,) * 17, (1 << 50,), (1 << 21, 1 << 21)])
def test_a_field_refuses_a_shape_that_cannot_be_a_row(shape):
    with pytest.raises(SchemaError):
        Field(shape, "uint8")


@pytest.mark.parametrize("space", [[1], {"low": float("nan")}, {"low": np.zeros(2)}, {"x": object()}])
def test_a_field_refuses_a_space_that_is_not_json(space):
    with pytest.raises(SchemaError, match="space"):
        Field((), "float32", space)


def test_an_array_of_the_exact_dtype_and_shape_is_not_copied():
    value = np.zeros((2, 3), "float32")
    assert Field((2, 3), "float32").cast(value, "obs") is value
    assert Field(3, "float32").cast(value, "obs", (2,)) is value


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [
        ("float32", 1.5, 1.5),
        ("float32", 2, 2.0),
        ("float32", True, 1.0),
        ("float16", np.float64(0.5), 0.5),
        ("float32", np.int64(7), 7.0),
        ("int8", 127, 127),
        ("int8", np.int64(-128), -128),
        ("uint8", np.array(255, "int64"), 255),
        ("int64", np.uint64(2**63 - 1), 2**63 - 1),
        ("uint64", 2**64 - 1, 2**64 - 1),
        ("int64", True, 1),
        ("bool", np.True_, True),
        ("bool", 1, True),
        ("bool", np.array(0, "uint8"), False),
        ("float32", torch.tensor(2.5, requires_grad=True), 2.5),
        ("float32", torch.tensor(2.5, dtype=torch.bfloat16), 2.5),
        ("int64", torch.tensor(3, dtype=torch.int32), 3),
    ],
)
def test_scalars_are_cast_by_the_rules_of_the_schema(dtype, value, expected):
    result = Field((), dtype).cast(value, "reward")
    assert type(result) is np.ndarray
    assert result.dtype == np.dtype(dtype)
    assert result.shape == ()
    assert result == expected


@pytest.mark.parametrize(
    ("dtype", "value", "message"),
    [
        ("int64", 1.0, "x: got float64 of shape (), needs int64 of shape ()"),
        ("bool", 1.0, "x: got float64 of shape (), needs bool of shape ()"),
        ("bool", 2, "x: 2 does not fit bool"),
        ("int8", 128, "x: 128 does not fit int8"),
        ("uint8", np.int64(-1), "x: -1 does not fit uint8"),
        ("int64", np.uint64(2**63), f"x: {2**63} does not fit int64"),
        ("float32", 1j, "x: got complex128 of shape (), needs float32 of shape ()"),
        ("float32", "3", "x: got <U1 of shape (), needs float32 of shape ()"),
        ("float32", None, "x: got object of shape (), needs float32 of shape ()"),
        ("float32", [1.0], "x: got float64 of shape (1,), needs float32 of shape ()"),
        ("int64", torch.tensor(1.0), "x: got float32 of shape (), needs int64 of shape ()"),
    ],
)
def test_a_scalar_that_does_not_fit_is_refused_by_name(dtype, value, message):
    with pytest.raises(SchemaError) as caught:
        Field((), dtype).cast(value, "x")
    assert str(caught.value) == message


def test_arrays_become_plain_contiguous_ones_of_the_field_dtype():
    field = Field((2, 3), "float32")
    expected = np.arange(6, dtype="float32").reshape(2, 3)
    for value in (
        expected.tolist(),
        expected.astype(">f8"),
        np.asfortranarray(expected),
        np.ma.masked_array(expected),
        torch.from_numpy(expected.copy()),
        expected.astype("int16"),
    ):
        result = field.cast(value, "obs")
        assert type(result) is np.ndarray
        assert result.dtype == np.float32
        assert result.dtype.isnative
        assert result.flags.c_contiguous
        assert np.array_equal(result, expected)
    assert field.cast(np.broadcast_to(np.float32(1), (5, 2, 3)), "obs", (5,)).shape == (5, 2, 3)


@pytest.mark.parametrize(
    "value", [np.zeros((3, 2)), [[1, 2, 3], [4, 5]], np.full((2, 3), "a"), {"a": 1}, [[None] * 3] * 2]
)
def test_an_array_that_does_not_fit_is_refused_by_name(value):
    with pytest.raises(SchemaError, match=r"^obs/a: .*needs float32 of shape \(2, 3\)$"):
        Field((2, 3), "float32").cast(value, "obs/a")


def test_integer_arrays_are_narrowed_only_when_every_value_fits():
    field = Field(3, "uint8")
    assert field.cast(np.array([0, 5, 255]), "obs").dtype == np.uint8
    for bad in ([0, 5, 256], [-1, 5, 255]):
        with pytest.raises(SchemaError, match="does not fit uint8"):
            field.cast(np.array(bad), "obs")


@pytest.mark.parametrize("wrap", [float, int, np.float64, np.array, lambda value: [value], lambda value: (0.0, value)])
@pytest.mark.parametrize(("value", "dtype"), [(1e39, "float32"), (-1e39, "float32"), (70000.0, "float16")])
def test_what_would_become_infinite_is_refused_with_its_value(wrap, value, dtype):
    given = wrap(value)
    named = int(value) if wrap is int else value
    with pytest.raises(SchemaError, match=rf"^reward: {re.escape(str(named))} does not fit {dtype}$"):
        Field(np.shape(given), dtype).cast(given, "reward")


def test_infinities_stay_what_they_are():
    for wrap in (float, np.float64, np.array):
        assert Field((), "float32").cast(wrap(-np.inf), "reward") == -np.inf
    values = Field(3, "float32").cast(np.array([np.inf, -np.inf, np.finfo(np.float32).max]), "obs")
    np.testing.assert_array_equal(values, np.array([np.inf, -np.inf, np.finfo(np.float32).max], np.float32))


@pytest.mark.parametrize("part", ["obs", "action", "extra", "episode"])
def test_a_schema_of_arrays_is_refused_by_the_name_of_the_part(part):
    parts = {"obs": Field(3, "float32"), "action": Field((), "int64"), part: np.zeros(3)}
    with pytest.raises(SchemaError, match=rf"^{part}: needs a .*, not ndarray$"):
        Schema(**parts)


@given(
    value=st.one_of(st.integers(-(2**70), 2**70), st.floats(width=32), st.booleans()),
    dtype=st.sampled_from(["bool", "int8", "uint16", "int64", "uint64", "float32", "float64"]),
    wrap=st.sampled_from([lambda v: v, lambda v: np.asarray(v)[()], lambda v: [v]]),
)
@settings(max_examples=200, deadline=None)
def test_a_cast_keeps_integers_exactly_or_refuses(value, dtype, wrap):
    wrapped = wrap(value)
    field = Field((1,) if isinstance(wrapped, list) else (), dtype)
    try:
        result = field.cast(wrapped, "x")
    except SchemaError:
        integral_fits = not isinstance(value, float) and dtype != "bool" and not dtype.startswith("f")
        assert not (integral_fits and np.iinfo(dtype).min <= value <= np.iinfo(dtype).max)
        return
    assert result.dtype == np.dtype(dtype)
    if not dtype.startswith("f"):
        assert not isinstance(value, float)
        assert int(result.reshape(())) == value


def test_leaves_come_in_one_order_with_slashed_paths():
    schema = nested_schema()
    assert list(schema.leaves) == [
        *("obs/image", "obs/state/0", "obs/state/1/deep", "action/0", "action/1", "reward", "extra/log_prob"),
        *("extra/hidden/h", "extra/hidden/c", "episode/seed", "episode/task"),
    ]
    assert list(schema.step_leaves) == list(schema.leaves)[:-2]
    assert schema.leaves["obs/state/0"] == Field((3,), "float32")
    assert list(Schema(F32, F32).leaves) == ["obs", "action", "reward"]


def test_unflatten_gives_whole_tuples_as_records_and_others_as_dicts():
    schema = nested_schema()
    whole = schema.unflatten("action", {"action/0": 1, "action/1": 2})
    assert isinstance(whole, tuple)
    assert (whole, whole["1"]) == ((1, 2), 2)
    assert schema.unflatten("action", {"action/1": 2}) == {"1": 2}
    dicts = Schema({"0": F32, "1": F32}, F32)
    assert type(dicts.unflatten("obs", {"obs/0": 1, "obs/1": 2})) is dict


def test_flatten_pairs_paths_with_values_and_unflatten_nests_them_again():
    schema = nested_schema()
    value = {"state": ("s", {"deep": "d"}), "image": "i"}
    flat = schema.flatten("obs", value)
    assert flat == [("obs/image", "i"), ("obs/state/0", "s"), ("obs/state/1/deep", "d")]
    as_dicts = {"image": "i", "state": {"0": "s", "1": {"deep": "d"}}}
    assert schema.flatten("obs", as_dicts) == flat
    assert schema.unflatten("obs", dict(flat)) == value
    assert schema.unflatten("obs", {"obs/image": 1}) == {"image": 1}
    assert schema.flatten("action", [1, 2]) == [("action/0", 1), ("action/1", 2)]
    assert schema.flatten("extra", {"hidden": {"h": 1, "c": 2}, "log_prob": 0})[0] == ("extra/log_prob", 0)
    assert schema.unflatten("extra", {"extra/hidden/h": 1}) == {"hidden": {"h": 1}}
    plain = Schema(F32, F32)
    assert plain.flatten("obs", {"any": 1}) == [("obs", {"any": 1})]
    assert plain.unflatten("obs", {"obs": 5, "reward": 1}) == 5
    assert plain.flatten("extra", {}) == []
    assert plain.unflatten("extra", {"obs": 1}) == {}


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("obs", {"image": 1}, "obs: 'state' is missing; known are 'image', 'state'"),
        ("obs", {"image": 1, "state": 2, "x": 3}, "obs: unknown key 'x'; known are 'image', 'state'"),
        ("obs", {"image": 1, "state": (1,)}, "obs/state: '1' is missing; known are '0', '1'"),
        ("obs", 3, "obs: got int, needs the keys 'image', 'state'"),
        ("action", (1, 2, 3), "action: unknown key '2'; known are '0', '1'"),
        ("extra", {"hidden": 1}, "extra: 'log_prob' is missing; known are 'log_prob', 'hidden'"),
        ("episode", {"sed": 1}, "episode: unknown key 'sed'; known are 'seed', 'task'"),
        ("episode", 3, "episode: got int, needs the keys 'seed', 'task'"),
    ],
)
def test_flatten_names_the_key_that_is_wrong(part, value, message):
    with pytest.raises(SchemaError) as caught:
        nested_schema().flatten(part, value)
    assert str(caught.value) == message


@pytest.mark.parametrize("part", ["extra", "episode"])
def test_a_value_that_the_schema_lacks_says_where_to_declare_it(part):
    with pytest.raises(SchemaError) as caught:
        Schema(F32, F32).flatten(part, {"log_prob": 1})
    assert str(caught.value) == (
        f"{part}: unknown key 'log_prob'; the schema has none: name it in Schema({part}={{...}})"
    )


def test_episode_values_may_be_left_out():
    assert nested_schema().flatten("episode", {"task": 2}) == [("episode/task", 2)]
    assert nested_schema().flatten("episode", {}) == []


@pytest.mark.parametrize("key", ["", ".", "..", "a/b", "a\\b", "__x", "zarr.json", "a\0b", "é" * 101, "\ud800", 3])
def test_keys_that_cannot_name_a_folder_are_refused(key):
    for build in (
        lambda: Schema({key: F32}, F32),
        lambda: Schema(F32, ({key: F32},)),
        lambda: Schema(F32, F32, extra={key: F32}),
        lambda: Schema(F32, F32, episode={"a": {key: F32}}),
    ):
        with pytest.raises(SchemaError, match="key"):
            build()


@pytest.mark.parametrize(
    "name", ["obs", "next_obs", "next_action", "weight", "done", "ret", "lane", "mask", "loss_mask", "self", "time"]
)
def test_names_that_an_append_or_a_batch_has_are_refused_for_extras(name):
    with pytest.raises(SchemaError, match=f"extra: the name '{name}' is taken"):
        Schema(F32, F32, extra={name: F32})


def test_collectors_may_store_values_and_indices_of_episodes():
    Schema(F32, F32, extra={"value": F32, "log_prob": F32}, episode={"index": Field((), "int64")})
    with pytest.raises(SchemaError, match="'x' is a name of both"):
        Schema(F32, F32, extra={"x": F32}, episode={"x": F32})
    for name in ("obs", "done", "time"):
        with pytest.raises(SchemaError, match=f"episode: the name '{name}' is taken"):
            Schema(F32, F32, episode={name: F32})


@pytest.mark.parametrize("reward", [Field((1,), "float32"), Field((), "bool"), "float32", {"a": F32}])
def test_the_reward_is_a_numeric_scalar(reward):
    with pytest.raises(SchemaError, match="reward: needs a numeric Field"):
        Schema(F32, F32, reward)


def deep(levels: int, leaf: object) -> object:
    for _ in range(levels):
        leaf = {"a": leaf}
    return leaf


@pytest.mark.parametrize("tree", [{}, (), [F32], None, "float32", {"a": {}}, deep(17, F32), deep(5000, F32)])
def test_trees_that_hold_no_fields_are_refused(tree):
    with pytest.raises(SchemaError, match=r"^obs"):
        Schema(tree, F32)


def test_too_many_fields_are_refused():
    with pytest.raises(SchemaError, match="at most 10000 fields"):
        Schema({str(i): F32 for i in range(10_000)}, F32)


def test_a_schema_survives_json_and_pickle():
    for schema in (
        nested_schema(),
        Schema(deep(16, F32), F32),
        Schema.from_spaces(SPACES, spaces.Discrete(3, start=-1)),
    ):
        text = json.dumps(schema.to_json(), allow_nan=False)
        for copy in (Schema.from_json(json.loads(text)), pickle.loads(pickle.dumps(schema))):
            assert copy == schema
            assert copy.leaves == schema.leaves
            assert list(copy.leaves) == list(schema.leaves)
            assert copy.flatten("episode", {}) == []


def good_json() -> dict:
    return {"obs": {"shape": [2], "dtype": "float32"}, "action": {"shape": [], "dtype": "int64"},
            "reward": {"shape": [], "dtype": "float32"}, "extra": {}, "episode": {}}  # fmt: skip


BAD_NODES = [
    None,
    3,
    [],
    {},
    "float32",
    {"shape": [2]},
    {"shape": 2, "dtype": "float32"},
    {"shape": [-2], "dtype": "float32"},
    {"shape": [2.5], "dtype": "float32"},
    {"shape": [True], "dtype": "float32"},
    {"shape": [None], "dtype": "float32"},
    {"shape": [1 << 60], "dtype": "float32"},
    {"shape": [10**400], "dtype": "uint8"},
    {"shape": [2], "dtype": "object"},
    {"shape": [2], "dtype": ["float32"]},
    {"shape": [2], "dtype": {"a": 1}},
    {"shape": [2], "dtype": "f4,f4"},
    {"shape": [2], "dtype": "float32", "space": 3},
    {"shape": [2], "dtype": "float32", "space": {"low": float("nan")}},
    {"dict": []},
    {"dict": {}},
    {"dict": {"..": {"shape": [], "dtype": "bool"}}},
    {"tuple": {}},
    {"tuple": []},
    {"tuple": [None]},
    {"dict": {str(i): {"shape": [], "dtype": "bool"} for i in range(10_001)}},
]


@pytest.mark.slow
@pytest.mark.parametrize("node", BAD_NODES, ids=lambda node: repr(node)[:40])
@pytest.mark.parametrize("part", ["obs", "action", "reward", "extra", "episode"])
def test_malformed_json_is_a_format_error_and_nothing_else(part, node):
    data = good_json()
    assert Schema.from_json(data).leaves["obs"].shape == (2,)
    data[part] = {"x": node} if part in ("extra", "episode") else node
    with pytest.raises(FormatError):
        Schema.from_json(data)


def test_missing_parts_deep_nesting_and_taken_names_are_format_errors():
    leaf: object = {"shape": [], "dtype": "bool"}
    for _ in range(5000):
        leaf = {"dict": {"a": leaf}}
    cases = [None, [], "x", {}, {"obs": 1}, good_json() | {"obs": leaf}, good_json() | {"extra": []}]
    cases += [good_json() | {"extra": {"next_x": good_json()["obs"]}}, good_json() | {"extra": None}]
    for data in cases:
        with pytest.raises(FormatError):
            Schema.from_json(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from(["float32", "O"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["shape", "dtype", "space", "dict", "tuple", "a", ".."]), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@given(part=st.sampled_from(["obs", "action", "reward", "extra", "episode"]), node=JSON)
@settings(max_examples=200, deadline=None)
def test_any_json_is_read_or_refused_with_a_format_error(part, node):
    try:
        schema = Schema.from_json(good_json() | {part: node})
    except FormatError:
        return
    assert Schema.from_json(schema.to_json()) == schema


SPACES = spaces.Dict(
    {
        "box": spaces.Box(-np.inf, np.inf, (2,), "float32"),
        "uneven": spaces.Box(np.array([0, -1]), np.array([1, 2]), dtype="int16"),
        "pair": spaces.Tuple((spaces.Discrete(7, start=3), spaces.MultiBinary((2, 2)))),
        "many": spaces.MultiDiscrete([3, 4], dtype="int32"),
    }
)


def test_from_spaces_keeps_shapes_dtypes_and_bounds():
    schema = Schema.from_spaces(SPACES, spaces.Box(0, 255, (4, 4, 3), "uint8"), extra={"log_prob": F32})
    leaves = schema.leaves
    assert leaves["obs/box"] == Field(2, "float32", {"type": "Box", "low": "-Infinity", "high": "Infinity"})
    assert leaves["obs/uneven"] == Field(2, "int16", {"type": "Box", "low": [0, -1], "high": [1, 2]})
    assert leaves["obs/pair/0"] == Field((), "int64", {"type": "Discrete", "n": 7, "start": 3})
    assert leaves["obs/pair/1"] == Field((2, 2), "int8", {"type": "MultiBinary"})
    assert leaves["obs/many"] == Field(2, "int32", {"type": "MultiDiscrete", "nvec": [3, 4], "start": 0})
    assert leaves["action"] == Field((4, 4, 3), "uint8", {"type": "Box", "low": 0, "high": 255})
    assert leaves["extra/log_prob"] == F32
    sample = SPACES.sample()
    for path, value in schema.flatten("obs", sample):
        leaves[path].cast(value, path)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(3),
        spaces.Graph(spaces.Discrete(2), None),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.OneOf((spaces.Discrete(2), spaces.Discrete(3))),
    ],
)
def test_spaces_of_varying_size_are_refused_by_name(space):
    with pytest.raises(SchemaError, match=rf"^obs/a/0: a {type(space).__name__} space cannot be stored"):
        Schema.from_spaces(spaces.Dict({"a": spaces.Tuple((space,))}), spaces.Discrete(2))
    with pytest.raises(SchemaError, match=rf"^action: a {type(space).__name__} space"):
        Schema.from_spaces(spaces.Discrete(2), space)


def test_from_env_takes_one_environment_of_a_vector():
    env = gym.make("CartPole-v1")
    envs = gym.wrappers.vector.RecordEpisodeStatistics(
        gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync")
    )
    single = Schema.from_env(env, episode={"seed": Field((), "int64")})
    assert single == Schema.from_env(envs, episode={"seed": Field((), "int64")})
    assert single.leaves["obs"].shape == (4,)
    assert single.leaves["action"].shape == ()
    env.close()
    envs.close()
    with pytest.raises(SchemaError, match="int is not an environment: .*; `Schema.from_example` takes one"):
        Schema.from_env(3)


FLOAT64 = spaces.Dict(
    {
        "x": spaces.Box(-0.1, np.array([0.1, np.inf, 1e300]), (3,), "float64"),
        "pair": spaces.Tuple((spaces.Box(0, 1, (2,), "float64"), spaces.Box(0, 9, (2,), "float16"))),
        "n": spaces.Discrete(3),
    }
)


def test_a_dtype_map_says_how_spaces_are_stored():
    mapped = Schema.from_spaces(FLOAT64, spaces.Discrete(5), dtype_map={"float64": "float32", "int64": "uint8"})
    assert {path: str(field.dtype) for path, field in mapped.leaves.items()} == {
        "obs/x": "float32",
        "obs/pair/0": "float32",
        "obs/pair/1": "float16",
        "obs/n": "uint8",
        "action": "uint8",
        "reward": "float32",
    }
    plain = Schema.from_spaces(FLOAT64, spaces.Discrete(5))
    assert plain.leaves["obs/x"].dtype == np.float64
    assert plain == Schema.from_spaces(FLOAT64, spaces.Discrete(5), dtype_map={"int8": "int64"})
    assert [field.shape for field in mapped.leaves.values()] == [field.shape for field in plain.leaves.values()]


def test_a_mapped_value_at_the_bounds_is_inside_the_mapped_bounds():
    leaf = Schema.from_spaces(FLOAT64, spaces.Discrete(5), dtype_map={"float64": "float32"}).leaves["obs/x"]
    assert leaf.space["high"] == [np.float32(0.1), "Infinity", "Infinity"]
    assert leaf.space["low"] <= leaf.cast(np.array([-0.1, -0.1, -0.1]), "obs/x").tolist()[0]
    assert leaf.cast(np.array([0.1, 1.0, 1.0]), "obs/x")[0] <= leaf.space["high"][0]


@pytest.mark.parametrize(
    ("dtype_map", "message"),
    [
        ({"float64": "int32"}, "dtype_map: float64 values cannot be stored as int32; map them to a float dtype"),
        ({"float16": "bool"}, "dtype_map: float16 values cannot be stored as bool; map them to a float dtype"),
        ({"complex64": "float32"}, "a field's dtype is one of .* not complex64"),
        ({"float64": None}, "a field's dtype is one of .* not None"),
        ("float32", re.escape('dtype_map: needs a dict such as {"float64": "float32"}, not \'float32\'')),
    ],
)
def test_a_dtype_map_that_no_value_could_follow_is_refused(dtype_map, message):
    with pytest.raises(SchemaError, match=f"^{message}$"):
        Schema.from_spaces(FLOAT64, spaces.Discrete(5), dtype_map=dtype_map)


def test_from_example_takes_shapes_and_dtypes_of_values():
    schema = Schema.from_example(
        {"image": np.zeros((4, 4, 3), "uint8"), "pair": (torch.zeros(2), np.float64(1))},
        (3, [0.5, 1.5], True),
        extra={"log_prob": -0.5, "hidden": {"h": torch.zeros(1, 2, dtype=torch.float16)}},
        episode={"seed": 7},
    )
    assert schema == Schema(
        obs={"image": Field((4, 4, 3), "uint8"), "pair": (Field(2, "float32"), Field((), "float64"))},
        action=(Field((), "int64"), Field(2, "float32"), Field((), "bool")),
        extra={"log_prob": F32, "hidden": {"h": Field((1, 2), "float16")}},
        episode={"seed": Field((), "int64")},
    )
    assert Schema.from_example(np.zeros(3), 0) == Schema(Field(3, "float64"), Field((), "int64"))


@pytest.mark.parametrize(
    ("obs", "message"),
    [
        ("text", r"obs: no field can be made of this str: a field's dtype is one of"),
        ({"a": (None,)}, r"obs/a/0: no field can be made of this NoneType"),
        ([[1], [1, 2]], "obs: no field can be made of this list"),
        (np.zeros((0, 2)), "obs: no field can be made of this ndarray: a field's shape"),
        (F32, "obs: an example is a value, not a Field; give Fields to Schema itself"),
        ({}, "obs: an empty dict holds no field"),
    ],
)
def test_an_example_that_is_no_value_is_refused(obs, message):
    with pytest.raises(SchemaError, match=f"^{message}"):
        Schema.from_example(obs, 0)
