"""Start-up on machines with accelerators, played by mocks."""

import subprocess
import types

import pytest

from jpaged import ConfigError
from jpaged.entrypoints import device_check
from jpaged.entrypoints.device_check import Machine, choose_platform, look_at_machine

NVIDIA = "an NVIDIA GPU (NVIDIA H200)"
TPU = "a TPU (4 chips)"


@pytest.mark.parametrize(
    ("machine", "requested", "chosen"),
    [
        (Machine(), None, None),
        (Machine(), "cpu", "cpu"),
        (Machine(has_cuda_plugin=True, has_tpu_plugin=True), None, None),
        (Machine(nvidia=NVIDIA, has_cuda_plugin=True), None, "gpu"),
        (Machine(nvidia=NVIDIA, has_cuda_plugin=True), "gpu", "gpu"),
        (Machine(nvidia=NVIDIA, has_cuda_plugin=True), "cpu", "cpu"),
        (Machine(nvidia=NVIDIA), "cpu", "cpu"),
        (Machine(has_cuda_plugin=True), "gpu", "gpu"),
        (Machine(tpu=TPU, has_tpu_plugin=True), None, "tpu"),
        (Machine(tpu=TPU), "cpu", "cpu"),
    ],
)
def test_what_is_chosen(machine, requested, chosen):
    assert choose_platform(requested, machine, {}) == chosen


@pytest.mark.parametrize("requested", [None, "gpu"])
def test_a_gpu_that_jax_cannot_use_is_said_with_the_line_that_helps(requested):
    with pytest.raises(ConfigError) as caught:
        choose_platform(requested, Machine(nvidia=NVIDIA), {})
    message = str(caught.value)
    assert "NVIDIA H200" in message
    assert '\n    pip install -e ".[cuda12]"\n' in message
    assert "--device cpu" in message
    assert caught.value.field == "device"


def test_a_tpu_that_jax_cannot_use_is_said_with_the_line_that_helps():
    with pytest.raises(ConfigError) as caught:
        choose_platform(None, Machine(tpu=TPU, has_cuda_plugin=True), {})
    assert '\n    pip install -e ".[tpu]"\n' in str(caught.value)


@pytest.mark.parametrize(
    ("requested", "machine", "there"),
    [
        ("gpu", Machine(), "it has: cpu"),
        ("tpu", Machine(), "it has: cpu"),
        ("tpu", Machine(nvidia=NVIDIA, has_cuda_plugin=True), f"it has: cpu, {NVIDIA}"),
        ("gpu", Machine(tpu=TPU, has_tpu_plugin=True), f"it has: cpu, {TPU}"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(requested, machine, there):
    with pytest.raises(ConfigError) as caught:
        choose_platform(requested, machine, {})
    assert there in str(caught.value)


def test_jax_platforms_is_a_choice_too():
    machine = Machine(nvidia=NVIDIA)
    assert choose_platform(None, machine, {"JAX_PLATFORMS": "cpu"}) == "cpu"
    assert choose_platform(None, machine, {"JAX_PLATFORMS": "cuda,cpu"}) is None
    with pytest.raises(ConfigError):
        choose_platform("gpu", machine, {"JAX_PLATFORMS": "cpu"})


@pytest.fixture
def bare(monkeypatch):
    """A machine with nothing on it, to which a test adds."""
    files: dict[str, str] = {}
    machine = types.SimpleNamespace(files=files, nvidia_smi=None, modules=set())

    def run(command, **options):
        assert command[0] == "/usr/bin/nvidia-smi"
        if isinstance(machine.nvidia_smi, Exception):
            raise machine.nvidia_smi
        return subprocess.CompletedProcess(command, 0, stdout=machine.nvidia_smi)

    def glob(pattern):
        start = pattern.partition("[")[0].partition("*")[0]
        return sorted({f for f in files if f.startswith(start)})

    which = lambda name: "/usr/bin/nvidia-smi" if machine.nvidia_smi is not None else None  # noqa: E731
    monkeypatch.setattr(device_check.shutil, "which", which)
    monkeypatch.setattr(device_check.subprocess, "run", run)
    monkeypatch.setattr(device_check.glob, "glob", glob)
    monkeypatch.setattr(device_check, "_read", lambda path: files.get(str(path), ""))
    monkeypatch.setattr(
        device_check.importlib.util,
        "find_spec",
        lambda name: object() if name in machine.modules else None,
    )
    return machine


def test_a_bare_machine(bare):
    assert look_at_machine() == Machine()


def test_an_nvidia_card_is_found_by_its_tool(bare):
    bare.nvidia_smi = "NVIDIA H200\nNVIDIA H200\n"
    bare.modules.add("jax_plugins.xla_cuda12")
    assert look_at_machine() == Machine(nvidia=NVIDIA, has_cuda_plugin=True)


@pytest.mark.parametrize(
    "failure", [None, OSError("broken"), subprocess.TimeoutExpired("nvidia-smi", 10), ""]
)
def test_an_nvidia_card_is_found_without_its_tool(bare, failure):
    bare.nvidia_smi = failure
    bare.files["/dev/nvidia0"] = ""
    assert look_at_machine() == Machine(nvidia="an NVIDIA GPU (/dev/nvidia0)")


def test_a_tool_without_a_card_is_no_card(bare):
    bare.nvidia_smi = subprocess.CalledProcessError(9, "nvidia-smi")
    assert look_at_machine() == Machine()


def test_tpu_chips_are_told_from_other_devices_of_the_same_maker(bare):
    for i, device in enumerate(["0x0063", "0x0063", "0x0042"]):
        folder = f"/sys/bus/pci/devices/0000:00:0{i}.0"
        bare.files |= {folder: "", f"{folder}/vendor": "0x1ae0", f"{folder}/device": device}
    bare.modules.add("libtpu")
    assert look_at_machine() == Machine(tpu="a TPU (2 chips)", has_tpu_plugin=True)


def test_this_machine_can_be_looked_at():
    assert isinstance(look_at_machine(), Machine)
