"""Compiles for a GPU that is not there, and reads what the compiler made of each kernel.

jax's CUDA plugin compiles for a described device without a driver and without CUDA's libraries;
the plugin and ptxas are all it takes (see `enable`). What this proves: lowering, layouts, register
and shared-memory fit, and the memory of a whole step. What only a device proves: numbers and time.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import topologies

from pallas_kernels.compat import lowering_for
from pallas_kernels.devices import Device

# Where `make test` puts the plugin: beside the environment's packages, so that jax does not see it
# unless it is asked to. A plugin without its libraries would fail at the start of every program.
_COMPILER = pathlib.Path(sys.prefix) / "cuda-compiler"

_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {device.shared_per_multiprocessor}
  shared_memory_per_block_optin: {device.shared_per_block}
  threads_per_core_limit: 2048
  core_count: {device.multiprocessors}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {device.memory_bandwidth:.0f}
  l2_cache_size: {device.l2}
  clock_rate_ghz: 2.0
  device_memory_size: {device.memory}
  cuda_compute_capability {{
    major: {device.compute_capability[0]}
    minor: {device.compute_capability[1]}
    feature_extension: ACCELERATED_FEATURES
  }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{device.name}"
"""

_TENSOR_CORE = re.compile(r"\bmma\.sync\b|\bwgmma\.mma_async\b")
_ENTRY = re.compile(r"\.entry (\w+)")
_LAUNCH = re.compile(r"kCustomKernel.* (\w+) grid: .*shared_memory: (\d+) bytes")
_MOSAIC_SHARED = re.compile(r"smem_scratch_bytes=(\d+)")
_REPORT = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers",
    re.DOTALL,
)


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel as compiled.

    Attributes:
      name: the kernel's own.
      registers: a thread.
      spills: bytes of registers spilled to memory, stores and loads.
      shared_bytes: shared memory a thread block, without Mosaic's few bytes of barriers.
      tensor_core_instructions: in its PTX.
    """

    name: str
    registers: int
    spills: int
    shared_bytes: int
    tensor_core_instructions: int


def enable() -> None:
    """Makes jax see the CUDA plugin that compiles here; call it before jax makes its first array.

    The program then runs on the CPU: the plugin looks for its libraries only where it may run.

    Raises:
      RuntimeError: naming the command that installs it.
    """
    jax.config.update("jax_platforms", "cpu")
    # Else LLVM starts llvm-symbolizer hundreds of times, where there is one, to no avail.
    os.environ.setdefault("LLVM_DISABLE_SYMBOLIZATION", "1")
    if not any(list(pathlib.Path(path).glob("jax_plugins/xla_cuda*")) for path in sys.path):
        if not _COMPILER.is_dir():
            raise RuntimeError(
                "compiling for a GPU takes jax's CUDA plugin, which is not here; make test "
                f"installs it into {_COMPILER.name}/ of its environment, and so does: pip install "
                f"--no-deps --target={_COMPILER} jax-cuda12-plugin=={jax.__version__} "
                f"jax-cuda12-pjrt=={jax.__version__} nvidia-cuda-nvcc-cu12"
            )
        sys.path.append(str(_COMPILER))


def compile_for(
    device: Device, function: Callable[..., Any], *arguments: Any, **options: Any
) -> jax.stages.Compiled:
    """Lowers and compiles `function` for a device that need not be there.

    Args:
      arguments: `jax.ShapeDtypeStruct`s in the function's structure.
      options: of `jax.jit`.
    """
    return _compile(device, function, arguments, options, {})


def inspect(
    device: Device, function: Callable[..., Any], *arguments: Any
) -> tuple[list[Launch], float]:
    """The kernels that `function` launches, XLA's own among them, and the seconds it took.

    A process should inspect once: Mosaic's compiler keeps what it compiled by the kernel alone,
    and hands out the same code for another architecture, without a word of its figures.
    """
    with tempfile.TemporaryDirectory() as folder, _mosaic_dumps_to(folder):
        dump = {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx"}
        begin = time.perf_counter()
        _compile(device, function, arguments, {}, dump)
        seconds = time.perf_counter() - begin
        launches = [*_triton_launches(pathlib.Path(folder)), *_mosaic_launches(folder)]
    return launches, seconds


def _compile(device, function, arguments, options, dump):
    topology = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=_DESCRIPTION.format(device=device)
    )
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    placed = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), arguments
    )
    with lowering_for(device.kind, device.multiprocessors):
        lowered = jax.jit(function, **options).lower(*placed)
    # jax looks for ptxas when it is imported, before `enable`; another would write another PTX.
    toolkit = {"xla_gpu_cuda_data_dir": str(_ptxas_path().parents[1])}
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0} | toolkit | dump)


@contextlib.contextmanager
def _mosaic_dumps_to(folder: str) -> Iterator[None]:
    """Mosaic's compiler has no options of its own: it reads the environment at every kernel."""
    os.environ["MOSAIC_GPU_DUMP_TO"] = folder
    try:
        yield
    finally:
        del os.environ["MOSAIC_GPU_DUMP_TO"]


def _triton_launches(folder: pathlib.Path) -> Iterator[Launch]:
    shared = {}
    for file in folder.glob("*.thunk_sequence.txt"):
        shared |= dict(_LAUNCH.findall(file.read_text()))
    for file in folder.glob("module_*.ptx"):
        text = file.read_text()
        if not shared.keys() & set(_ENTRY.findall(text)):
            continue
        tensor_core = {
            _ENTRY.search(part)[1]: len(_TENSOR_CORE.findall(part))
            for part in re.split(r"(?=\.visible \.entry)", text)
            if _ENTRY.search(part)
        }
        for figures in _REPORT.finditer(_ptxas(file, text)):
            name = figures["name"]
            if name in shared:
                yield Launch(
                    name=name,
                    registers=int(figures["registers"]),
                    spills=int(figures["stores"]) + int(figures["loads"]),
                    shared_bytes=int(shared[name]),
                    tensor_core_instructions=tensor_core[name],
                )


def _mosaic_launches(folder: str) -> Iterator[Launch]:
    for report in pathlib.Path(folder).glob("*.ptxas"):
        figures = _REPORT.search(report.read_text())
        resources = report.with_suffix(".resources.txt").read_text()
        yield Launch(
            name=figures["name"],
            registers=int(figures["registers"]),
            spills=int(figures["stores"]) + int(figures["loads"]),
            shared_bytes=int(_MOSAIC_SHARED.search(resources)[1]),
            tensor_core_instructions=len(
                _TENSOR_CORE.findall(report.with_suffix(".ptx").read_text())
            ),
        )


def _ptxas(file: pathlib.Path, text: str) -> str:
    """What ptxas says of a PTX file, with its warnings."""
    target = re.search(r"\.target (\w+)", text)[1]
    command = [str(_ptxas_path()), f"-arch={target}", "-v", str(file), "-o", os.devnull]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def _ptxas_path() -> pathlib.Path:
    for path in sys.path:
        found = sorted(pathlib.Path(path).glob("nvidia/*/bin/ptxas"))
        if found:
            return found[-1]
    raise RuntimeError("ptxas is not here: pip install nvidia-cuda-nvcc-cu12")
