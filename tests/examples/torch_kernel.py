"""A kernel of Triton, whose source must be in a file of its own: it is read from there."""

import triton
import triton.language as tl


@triton.jit
def double(values, count, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    tl.store(values + place, tl.load(values + place, mask=mask) * 2, mask=mask)
