"""Weights in two layouts: public, the checkpoint's names and shapes, and run, the arrays a step takes.

Knows the one declared transform that makes each run array from public tensors, and its inverse. The same
transforms serve the loader and live updates from a training program. Knows nothing of files.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from jpaged.errors import ModelLoadError
from jpaged.models.config import ModelConfig
from jpaged.models.decoder import CausalLM
from jpaged.models.registry import abstract_model

# Run module -> the public modules whose tensors it holds, one after the other on the first axis.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# Buffers that old checkpoints carry although the config determines them.
_DERIVED = ("rotary_emb.inv_freq",)
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Prefixes in checkpoints with a vision tower -> those of the text model; None is no part of it.
_LANGUAGE = ("model.language_model.", "language_model.model.")
_MULTIMODAL: tuple[tuple[str, str | None], ...] = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.vision_tower.", None),
    ("vision_tower.", None),
    ("model.multi_modal_projector.", None),
    ("multi_modal_projector.", None),
)


S = TypeVar("S")


@runtime_checkable
class Shaped(Protocol):
    """Anything with a shape and a dtype: an array, or the header of one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


def _flat(module: nnx.Module) -> dict[str, Any]:
    """Parameters by dotted name, in the order of the module's flattened state."""
    state = nnx.state(module, nnx.Param)
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}


def public_shapes(config: ModelConfig, dtype: DTypeLike) -> dict[str, jax.ShapeDtypeStruct]:
    """Name and shape of each tensor of a checkpoint of this model."""
    return _shapes(abstract_model(config, dtype))


def _shapes(model: CausalLM) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in _flat(model).items()
    }


def _text_name(name: str) -> str | None:
    """The public name of a multimodal checkpoint's tensor; None if it is no part of the text model."""
    for prefix, replacement in _MULTIMODAL:
        if name.startswith(prefix):
            return None if replacement is None else replacement + name[len(prefix) :]
    return name


def public_names(given: Mapping[str, S]) -> dict[str, S]:
    """The same by public name, where `given` names tensors as some checkpoint of the model does."""
    if not any(name.startswith(_LANGUAGE) for name in given):
        return dict(given)
    renamed = ((_text_name(name), tensor) for name, tensor in given.items())
    return {name: tensor for name, tensor in renamed if name is not None}


def flatten_public(tree: object) -> dict[str, Array]:
    """Arrays by checkpoint name, of a module from `build_model`, its state, or a dict, flat or nested.

    Keys of nested dicts and lists are joined with dots. Raises ModelLoadError for what is no array and for
    a name that occurs twice.
    """
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree, nnx.Param)
    found: dict[str, Array] = {}
    for name, leaf in _leaves(tree, ""):
        if isinstance(leaf, nnx.Variable):
            leaf = leaf.get_value()
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ModelLoadError(
                f"params: {name or 'the tree'} is {type(leaf).__name__}, not an array"
            )
        if name in found:
            raise ModelLoadError(f"params: {name} occurs twice")
        found[name] = leaf
    return found


def _leaves(tree: object, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        items: Iterable[tuple[object, object]] = tree.items()
    elif isinstance(tree, list | tuple):
        items = enumerate(tree)
    else:
        yield prefix, tree
        return
    for key, value in items:
        yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))


def check_public(shapes: Mapping[str, Shaped], given: Mapping[str, Shaped]) -> None:
    """Raises ModelLoadError, listing all tensors that are missing, extra, or of another shape or dtype.

    Not counted as extra: buffers that the config determines, the output head of a model that ties it to its
    embedding, and what a multimodal checkpoint has beside its language model.
    """
    given = public_names(given)
    problems = [f"missing: {name}" for name in shapes if name not in given]
    for name, tensor in given.items():
        if name not in shapes:
            if not _meaningless(name, tensor, shapes):
                problems.append(f"not part of this model: {name} {tuple(tensor.shape)}")
            continue
        want = shapes[name]
        if tuple(tensor.shape) != tuple(want.shape):
            problems.append(f"{name} has shape {tuple(tensor.shape)}, not {tuple(want.shape)}")
        if jnp.dtype(tensor.dtype) != jnp.dtype(want.dtype):
            problems.append(f"{name} has dtype {tensor.dtype}, not {want.dtype}")
    if problems:
        raise ModelLoadError(
            f"params do not fit the model in {len(problems)} places:\n  " + "\n  ".join(problems)
        )


def _meaningless(name: str, tensor: Shaped, shapes: Mapping[str, Shaped]) -> bool:
    if name.endswith(_DERIVED):
        return True
    return (
        name == _HEAD
        and _EMBEDDING in shapes
        and tuple(tensor.shape) == tuple(shapes[_EMBEDDING].shape)
    )


@dataclasses.dataclass(frozen=True)
class RunArray:
    """One run array: its name and the public tensors it is made of, joined on the first axis."""

    name: str
    spec: jax.ShapeDtypeStruct
    sources: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class RunLayout:
    """The flat tuple of arrays that a step takes, and how public tensors become it.

    Attributes:
        arrays: one entry for each run array, in order.
        public: name, shape and dtype of each public tensor.
    """

    config: ModelConfig
    arrays: tuple[RunArray, ...]
    public: dict[str, jax.ShapeDtypeStruct]
    structure: Any

    @classmethod
    def create(cls, config: ModelConfig, *, dtype: DTypeLike, platform: str) -> "RunLayout":
        """The layout for a platform; so far all have the same one."""
        del platform
        model = abstract_model(config, dtype, fused=True)
        graph, state = nnx.split(model)
        _, tree = jax.tree.flatten(state)
        arrays = tuple(
            RunArray(name, spec, _sources(name)) for name, spec in _shapes(model).items()
        )
        return cls(config, arrays, public_shapes(config, dtype), (graph, tree))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(array.name for array in self.arrays)

    @property
    def specs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(array.spec for array in self.arrays)

    def merge(self, arrays: tuple[Array, ...]) -> CausalLM:
        """The model over these run arrays, for use while tracing."""
        graph, tree = self.structure
        return nnx.merge(graph, jax.tree.unflatten(tree, arrays))

    def to_run(
        self,
        public: Mapping[str, Any] | Iterable[tuple[str, Any]],
        *,
        device: Any = None,
    ) -> tuple[Array, ...]:
        """Run arrays on `device` (a Device or Sharding), made of public tensors one at a time.

        Takes checkpoint names in any order; each tensor is cast to the layout's dtype, copied and let go, so
        that no result shares memory with what was given. Raises ModelLoadError for tensors that are missing,
        unknown, repeated or of a wrong shape.
        """
        items = public.items() if isinstance(public, Mapping) else public
        tower = self.config.model_type == "gemma3_text"
        places = {s: (i, n) for i, a in enumerate(self.arrays) for n, s in enumerate(a.sources)}
        waiting: dict[int, dict[int, Any]] = {}
        done: list[Array | None] = [None] * len(self.arrays)
        for given_name, tensor in items:
            name = _text_name(given_name) if tower else given_name
            if name is None or _meaningless(name, tensor, self.public) and name not in places:
                continue
            if name not in places:
                raise ModelLoadError(f"params: {given_name} is not part of this model")
            index, part = places[name]
            parts = waiting.setdefault(index, {})
            if done[index] is not None or part in parts:
                raise ModelLoadError(f"params: {given_name} occurs twice")
            if tuple(tensor.shape) != self.public[name].shape:
                raise ModelLoadError(
                    f"params: {given_name} has shape {tuple(tensor.shape)}, "
                    f"not {self.public[name].shape}"
                )
            parts[part] = tensor
            if len(parts) == len(self.arrays[index].sources):
                ordered = [parts[n] for n in range(len(parts))]
                done[index] = _fuse(ordered, self.arrays[index].spec.dtype, device)
                del waiting[index], parts, ordered
            del tensor
        missing = [
            s for s, (i, n) in places.items() if done[i] is None and n not in waiting.get(i, {})
        ]
        if missing:
            raise ModelLoadError(f"params: missing {', '.join(missing)}")
        return tuple(array for array in done if array is not None)

    def to_public(self, arrays: tuple[Array, ...]) -> dict[str, Array]:
        """The inverse of `to_run`: public tensors by name."""
        found: dict[str, Array] = {}
        for entry, array in zip(self.arrays, arrays, strict=True):
            start = 0
            for name in entry.sources:
                rows = self.public[name].shape[0]
                found[name] = array[start : start + rows]
                start += rows
        return {name: found[name] for name in self.public}


def _sources(name: str) -> tuple[str, ...]:
    """The public tensors of a run array."""
    *modules, module, leaf = name.split(".")
    return tuple(".".join([*modules, part, leaf]) for part in FUSED.get(module, (module,)))


def _fuse(parts: list[Any], dtype: DTypeLike, device: Any) -> Array:
    """The parts one after the other in fresh memory on `device`.

    Parts in host memory are joined there, so that a live update on a CPU compiles nothing.
    """
    if all(_on_host(part) for part in parts):
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        joined = np.empty(shape, dtype)
        start = 0
        for part in parts:
            joined[start : start + part.shape[0]] = np.asarray(part)
            start += part.shape[0]
        return jax.device_put(joined, device)
    on_device = [jax.device_put(part, device) for part in parts]
    return _join(on_device, dtype=jnp.dtype(dtype))


def _on_host(part: Any) -> bool:
    if isinstance(part, jax.Array):
        return part.is_fully_addressable and all(d.platform == "cpu" for d in part.devices())
    return True


def _join(parts: list[Array], *, dtype: jnp.dtype[Any]) -> Array:
    """Concatenation in new memory, also of a single part."""
    if len(parts) == 1:
        return jnp.array(parts[0], dtype=dtype, copy=True)
    return jnp.concatenate([part.astype(dtype) for part in parts])
