"""SamplingParams: every wrong value names its field and what is allowed."""

import math

import numpy as np
import pytest

from jpaged.errors import RequestError
from jpaged.sampling.params import RequestOutputKind, SamplingParams

NAN, INF = math.nan, math.inf
WRONG = {
    "n": [0, -1, 129, 1.5, "2", None, True],
    "temperature": [-0.1, -INF, NAN, INF, "1", None, False],
    "top_k": [-2, 2**31, 1.0, "5", None, True],
    "top_p": [0, -0.5, 1.0001, NAN, INF, "0.5", None, True],
    "seed": [-(2**63) - 1, 2**64, 1.5, "7", True],
    "max_tokens": [0, -1, 2**31, 2.5, "3", True],
    "stop": [5, [1], ["a", None], "", [""], ["x" * 1025], ["s"] * 17, {"a": 1}, b"x", [b"x"]],
    "stop_token_ids": [5, "12", [-1], [1.0], [True], [2**31], ["1"], [1] * 1025, {1: 2}],
    "ignore_eos": [1, "yes", None],
    "include_stop_str_in_output": [0, "no", None],
    "skip_special_tokens": [1, "yes", None],
    "logprobs": [-1, 21, 1.0, "5", True],
    "output_kind": ["delta", 1, None],
}


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, values in WRONG.items() for v in values], ids=repr
)
def test_a_wrong_value_names_its_field(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
    assert field.removesuffix("s") in str(caught.value) or "stop" in str(caught.value)
    assert isinstance(caught.value, ValueError)


RIGHT = {
    "n": [1, 128, np.int64(3)],
    "temperature": [0, 0.0, 1, 1e-9, 1e9, np.float32(0.5)],
    "top_k": [-1, 0, 1, 2**31 - 1, np.int32(4)],
    "top_p": [1, 1.0, 1e-9, 0.5, np.float64(0.3)],
    "seed": [None, 0, -(2**63), 2**64 - 1],
    "max_tokens": [None, 1, 2**31 - 1],
    "stop": [None, "a", ["a"], ("a", "b"), [], "x" * 1024],
    "stop_token_ids": [None, [], [0], (5, 6), [np.int64(7)]],
    "logprobs": [None, 0, 20],
    "output_kind": list(RequestOutputKind),
}


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, values in RIGHT.items() for v in values], ids=repr
)
def test_values_at_the_limits_are_taken(field: str, value: object) -> None:
    SamplingParams(**{field: value})  # type: ignore[arg-type]


def test_values_are_normalised() -> None:
    params = SamplingParams(temperature=1, top_k=-1, stop="a", stop_token_ids=[np.int64(3)])
    assert type(params.temperature) is float and params.top_k == 0
    assert params.stop_strings == ("a",) and params.stop_ids == (3,)
    assert type(params.stop_ids[0]) is int
    assert SamplingParams().stop_strings == () and SamplingParams().stop_ids == ()


def test_replace_checks_again_and_changes_nothing_else() -> None:
    params = SamplingParams(temperature=0.5, stop=["a"], seed=3)
    changed = params.replace(max_tokens=5)
    assert changed.max_tokens == 5 and changed.replace(max_tokens=16) == params
    with pytest.raises(RequestError, match="top_p must be in"):
        params.replace(top_p=2)


def test_params_cannot_be_changed_in_place() -> None:
    params = SamplingParams()
    with pytest.raises(AttributeError):
        params.temperature = 0.5  # type: ignore[misc]


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
