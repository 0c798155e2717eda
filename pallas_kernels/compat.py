"""What differs between the versions of jax that the kernels run on."""

import contextlib

import jax

_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])

HAS_MOSAIC = _VERSION >= (0, 11)


def require_mosaic(implementation: str) -> None:
    """Refuses a Mosaic GPU kernel where jax cannot compile it.

    Raises:
      NotImplementedError: naming both versions of jax.
    """
    if not HAS_MOSAIC:
        raise NotImplementedError(
            f"implementation {implementation!r} needs jax 0.11 or newer, and this is "
            f"{jax.__version__}; 'triton' runs on both"
        )


def lowering_for(kind: str, multiprocessors: int) -> contextlib.AbstractContextManager[None]:
    """Lets a kernel be lowered for a GPU that is not there: from jax 0.11 on lowering asks for it.

    Args:
      kind: a `device_kind` that jax knows.
    """
    if not hasattr(jax.sharding, "AbstractDevice"):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(
        device_kind=kind, platform="gpu", num_cores=multiprocessors
    )
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)
