"""Compiles an engine's steps for a chip that is not there, and says what memory they would take.

    python scripts/compile_for.py "tpu v5e:2x2" "gpu NVIDIA H200 141GB HBM3e"
    python scripts/compile_for.py --model qwen3-0.6b "tpu v5e:2x2"
    python scripts/compile_for.py --model folder/config.json "tpu v6e:2x2"

Needs the `aot` extra, with the CUDA plugin in the version of the installed jaxlib. Proves that XLA lowers and
compiles forward and sample for the chip and that the page pool is written in place; it runs nothing.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import re
import sysconfig
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# No cloud's metadata server is asked, and several processes may compile at once.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from jpaged.models.config import ModelConfig
from jpaged.models.weights import RunLayout
from jpaged.pallas_kernels import allocate_kv
from jpaged.worker.step_input import StepShape
from jpaged.worker.step_program import empty_rows, make_forward, make_sample

PRESETS = {
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    },
}
ROWS, LENGTH, PAGE_SIZE, PAGES = 64, 4096, 16, 4097


def gpu_description(name: str) -> str:
    """XLA's own description of a GPU, which the CUDA plugin carries for the chips it knows."""
    site = pathlib.Path(sysconfig.get_paths()["purelib"])
    plugins = sorted(site.glob("jax_plugins/xla_cuda*/xla_cuda_plugin.so"))
    if not plugins:
        raise SystemExit("no CUDA plugin is installed: jax-cuda12-plugin and jax-cuda12-pjrt")
    found = {}
    pattern = rb'gpu_device_info \{[^\0]{0,20000}?device_description_str: "([^"]+)"\n'
    for match in re.finditer(pattern, plugins[0].read_bytes()):
        found[match[1].decode()] = match[0].decode()
    if name not in found:
        raise SystemExit(f"the plugin does not describe {name!r}; it knows {', '.join(found)}")
    return found[name]


def chip(target: str) -> tuple[str, jax.Device]:
    """The platform and a device that can be compiled for."""
    platform, _, name = target.partition(" ")
    if platform == "tpu":
        topology = topologies.get_topology_desc(topology_name=name, platform="tpu")
    elif platform == "gpu":
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=gpu_description(name), topology="1x1x1"
        )
    else:
        raise SystemExit(f"{target!r} is not 'tpu TOPOLOGY' or 'gpu NAME'")
    return platform, topology.devices[0]


def report(what: str, lowered: jax.stages.Lowered, start: float, pool: int) -> None:
    """Compiles, and says how long it took and what it would take; the pool must not be copied."""
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    mib = {
        name: getattr(memory, f"{name}_size_in_bytes") / 2**20
        for name in ("argument", "output", "alias", "temp")
    }
    sizes = ", ".join(f"{name} {size:.1f}" for name, size in mib.items())
    print(f"  {what}: compiled in {time.monotonic() - start:.1f} s; MiB: {sizes}")
    if memory.alias_size_in_bytes < pool or (pool and memory.temp_size_in_bytes >= pool):
        raise SystemExit(f"{what}: the page pool of {pool / 2**20:.1f} MiB is copied")


def compile_for(target: str, config: ModelConfig, dtype: str, tokens: list[int]) -> None:
    platform, device = chip(target)
    print(f"{target}: {device.device_kind}, jax {jax.__version__}, {config.model_type}, {dtype}")
    sharding = SingleDeviceSharding(device)

    def on_chip(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    layout = RunLayout.create(config, dtype=dtype, platform=platform)
    params = tuple(map(on_chip, layout.specs))
    # A pool of one layer, whose form is then given all layers: nothing is allocated.
    small = allocate_kv(
        1, 2, PAGE_SIZE, config.num_kv_heads, config.head_dim, dtype=dtype, platform=platform
    )
    kv = tuple(
        dataclasses.replace(
            small,
            pages=jax.ShapeDtypeStruct(
                (len(group.layers), PAGES, *small.pages.shape[2:]),
                small.pages.dtype,
                sharding=sharding,
            ),
        )
        for group in config.kv_groups
    )
    pool = sum(math.prod(g.pages.shape) * g.pages.dtype.itemsize for g in kv)
    rows = jax.tree.map(on_chip, empty_rows(ROWS))
    lowering = (platform.replace("gpu", "cuda"),)
    with jax.default_device(device):
        for count in tokens:
            start = time.monotonic()
            widths = tuple(LENGTH // PAGE_SIZE for _ in kv)
            shape = StepShape(count, min(count, ROWS), ROWS, widths)
            forward = make_forward(layout, shape, attention=None, platform=platform)
            packed = jax.ShapeDtypeStruct((shape.size,), np.int32, sharding=sharding)
            traced = jax.jit(forward, donate_argnums=(1, 2)).trace(params, kv, rows, packed)
            lowered = traced.lower(lowering_platforms=lowering)
            report(f"forward of {count} tokens", lowered, start, pool)
        start = time.monotonic()
        hidden = jax.ShapeDtypeStruct((ROWS, config.hidden_size), dtype, sharding=sharding)
        row_ids = jax.ShapeDtypeStruct((ROWS,), np.int32, sharding=sharding)
        sample = jax.jit(make_sample(layout, platform=platform), donate_argnums=1)
        traced = sample.trace(params, rows, hidden, row_ids)
        report(f"sample of {ROWS} rows", traced.lower(lowering_platforms=lowering), start, 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("targets", nargs="+", metavar="TARGET", help="'tpu TOPOLOGY' or 'gpu NAME'")
    parser.add_argument(
        "--model",
        default="smollm2-135m",
        help=f"{', '.join(PRESETS)}, or the path of a config.json",
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=[ROWS, 2048], help="step sizes")
    args = parser.parse_args()
    given = PRESETS.get(args.model) or json.loads(pathlib.Path(args.model).read_text())
    config = ModelConfig.from_hf(given)
    for target in args.targets:
        compile_for(target, config, args.dtype, args.tokens)


if __name__ == "__main__":
    main()
