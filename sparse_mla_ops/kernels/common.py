"""Device functions that several kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

# Layouts of a KV cache row, as constexpr arguments of kernels (formats.KVLayout.kind).
PLAIN = tl.constexpr(0)
FP8 = tl.constexpr(1)
DS_MLA = tl.constexpr(2)

# The 656-byte row: 512 fp8 values in groups of 128, 4 fp32 scales, 64 bf16 rope values.
DS_MLA_GROUPS = tl.constexpr(4)
DS_MLA_GROUP = tl.constexpr(128)
DS_MLA_SCALES_AT = tl.constexpr(512)
DS_MLA_ROPE_AT = tl.constexpr(528)
AMAX_FLOOR = tl.constexpr(1e-4)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def launch_early():
    """First thing in a kernel that is launched before the one ahead of it in the stream has ended.

    Hopper's programmatic dependent launch: let the next kernel be launched as early, and wait for the end of the one
    ahead, whose writes are visible then. Before this call no memory may be touched.
    """
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()


@triton.jit
def unsigned(x):
    """The same bits; a negative number becomes a larger one than any number of slots."""
    if x.dtype == tl.int64:
        return x.to(tl.uint64, bitcast=True)
    else:
        return x.to(tl.uint32, bitcast=True)


@triton.jit
def is_slot(slot, num_slots):
    """Whether a cache has the slot: not negative, not beyond its end. One comparison."""
    return unsigned(slot) < unsigned(num_slots)


@triton.jit
def row_offset(slot, num_slots, block_size, stride_block, stride_row):
    """Elements from the start of a cache to the row of `slot`; in 64 bits, blocks and rows at any pitch.

    The division takes 32 bits where they hold every slot: in 64 it is a hundred instructions. Of what is no slot the
    result means nothing.
    """
    slot = unsigned(slot.to(num_slots.dtype))
    size = unsigned(block_size.to(num_slots.dtype))
    block = slot // size
    return block.to(tl.int64) * stride_block + (slot - block * size).to(tl.int64) * stride_row


@triton.jit
def cast(x, dtype: tl.constexpr, EMULATED: tl.constexpr):
    """fp32 → a 16- or 32-bit float, round to nearest even.

    EMULATED: Triton's interpreter truncates to bf16, so there it is rounded by hand.
    """
    if EMULATED and dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def to_fp8(x, dtype: tl.constexpr, fp8_max: tl.constexpr, EMULATED: tl.constexpr):
    """fp32 → e4m3fn (fp8_max 448) or e4m3fnuz (240), saturating, round to nearest even; NaN stays NaN.

    EMULATED: Triton's interpreter does not round to nearest even, so there it is done by hand.
    """
    x = tl.maximum(x, -fp8_max, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, fp8_max, propagate_nan=tl.PropagateNan.ALL)
    if EMULATED:
        bias: tl.constexpr = 7 if fp8_max == 448.0 else 8
        magnitude = tl.abs(x)
        bits = magnitude.to(tl.uint32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - bias) << 3)
        # Below the smallest normal value, codes count steps of 2^(−2 − bias): those of fp32 at 2^(21 − bias).
        offset: tl.constexpr = 16384.0 if fp8_max == 448.0 else 8192.0
        subnormal = (magnitude + offset).to(tl.uint32, bitcast=True) - ((127 + 21 - bias) << 23)
        code = tl.where(magnitude < offset / 1048576.0, subnormal, normal)
        sign = (x.to(tl.uint32, bitcast=True) >> 31) << 7
        if fp8_max == 240.0:
            code = tl.where(x == x, tl.where(code == 0, 0, sign | code), 0x80)
        else:
            code = sign | tl.where(x == x, code, 0x7F)
        return code.to(tl.uint8).to(dtype, bitcast=True)
    else:
        if fp8_max == 240.0:  # e4m3fnuz has no −0, its pattern is NaN. Half the smallest subnormal still goes to zero.
            x = tl.where(tl.abs(x) <= 0.00048828125, 0.0, x)
        return x.to(dtype)


@triton.jit
def round_up_to_power_of_two(x):
    """2^ceil(log2(x)) of a positive normal fp32: a mantissa that is not zero carries into the exponent."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def amax(x, axis: tl.constexpr):
    """Largest magnitude; NaN does not count, infinity counts as the largest finite value."""
    return tl.minimum(tl.max(tl.abs(tl.where(x == x, x, 0.0)), axis), FLOAT32_MAX)
