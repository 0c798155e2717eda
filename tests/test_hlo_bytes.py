"""Bytes a stage, on HLO small enough to add up by hand and on what XLA writes here."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.hlo_bytes import bytes_by_stage

HLO = """HloModule step

%fused (p0: f32[100,8], p1: s32[4]) -> f32[4,8] {
  %p0 = f32[100,8]{1,0} parameter(0)
  %p1 = s32[4]{0} parameter(1)
  ROOT %g = f32[4,8]{1,0} gather(%p0, %p1), offset_dims={1}
}

%placed (p2: bf16[50,6], p3: bf16[2,6], p4: s32[]) -> bf16[50,6] {
  %p2 = bf16[50,6]{1,0} parameter(0)
  %p3 = bf16[2,6]{1,0} parameter(1)
  %p4 = s32[] parameter(2)
  ROOT %u = bf16[50,6]{1,0} dynamic-update-slice(%p2, %p3, %p4, %p4)
}

ENTRY %main (a: f32[100,8], i: s32[4], c: bf16[50,6], r: bf16[2,6], s: s32[]) -> (f32[4,8]) {
  %a = f32[100,8]{1,0} parameter(0)
  %i = s32[4]{0} parameter(1)
  %c = bf16[50,6]{1,0} parameter(2)
  %r = bf16[2,6]{1,0} parameter(3)
  %s = s32[] parameter(4)
  %rows = f32[4,8]{1,0} fusion(%a, %i), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/look/x"}
  %cache = bf16[50,6]{1,0} fusion(%c, %r, %s), kind=kLoop, calls=%placed
  %k = f32[4,8]{1,0} custom-call(%rows), custom_call_target="__gpu$xla.gpu.triton"
  %sum = f32[4,8]{1,0} add(%rows, %k), metadata={op_name="jit(f)/look/add"}
  ROOT %out = (f32[4,8]{1,0}, bf16[50,6]{1,0}) tuple(%sum, %cache)
}
"""


def test_slices_and_updates_in_place_count_as_what_they_touch_and_kernels_do_not_count():
    moved = bytes_by_stage(HLO, {"look": "/look/"})
    look = (4 * 8 * 4 + 4 * 4 + 4 * 8 * 4) + 3 * 4 * 8 * 4  # gather: rows, indices, result; add
    place = 2 * 6 * 2 + 4 + 2 * 6 * 2  # the rows, where, and the rows again in their place
    assert moved == {"look": look, "other": place}


@pytest.mark.parametrize("rows", [3, 7])
def test_a_product_compiled_here_moves_its_operands_and_its_result(rows):
    shapes = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, 20), (20, 11)))
    hlo = jax.jit(lambda x, y: x @ y).lower(*shapes).compile().as_text()
    moved = bytes_by_stage(hlo, {"product": "dot_general"})
    assert moved["product"] == 4 * (rows * 20 + 20 * 11 + rows * 11)
