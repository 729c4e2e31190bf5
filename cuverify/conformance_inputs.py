"""The probes of conformance, and the inputs that a GPU and the host lane get for each.

Inputs are drawn once, when a GPU is recorded, and kept with its outputs: a change here changes the
next recording and none of the present ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

_SEED = 20_511


@dataclass(frozen=True)
class Probe:
    """One kernel of the probes' text.

    Parameters
    ----------
    kernel : str
        Its name.
    covers : tuple of str
        The wrappers and intrinsics that it runs.
    draw : callable
        Gives the inputs, by parameter, of a random generator. Their first extent is ``n``.
    rule : {"bits", "float", "exp2", "mma", "counted"}
        How outputs are compared: bit by bit; bit by bit with any NaN for any other; within 2 ulp of
        the true power; by rounding model; bit by bit without a verdict.
    threads : int
        Of a block.
    tiles : bool
        Whether a block works on one of the ``n``, or threads stride over them.
    """

    kernel: str
    covers: tuple[str, ...]
    draw: Callable[[np.random.Generator], Arrays]
    rule: str = "bits"
    threads: int = 128
    tiles: bool = False


_FLOATS = """
    00000000 00000001 007fffff 00800000 33000000 33000001 33800000 387fffff 38800000 3effffff
    3f000000 3f7fffff 3f800000 3f800001 3fc00000 40200000 477fe000 477fefff 477ff000 4b000000
    4b7fffff 4effffff 4f000000 7f7f7fff 7f7f8000 7f7fffff 7f800000 7f800001 7fc00000 7fffffff
"""


def _special_floats() -> NDArray[np.float32]:
    bits = np.array([int(text, 16) for text in _FLOATS.split()], np.uint32)
    return np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32)


def _words(rng: np.random.Generator, *shape: int) -> NDArray[np.uint32]:
    """Return random words of all magnitudes: few bits, many bits, runs, none."""
    words = rng.integers(0, 2**32, shape, dtype=np.uint64).astype(np.uint32)
    shift = rng.integers(0, 32, shape).astype(np.uint32)
    kind = rng.integers(0, 8, shape)
    words = np.where(kind == 0, words >> shift, words)
    words = np.where(kind == 1, np.uint32(1) << shift, words)
    words = np.where(kind == 2, ~(np.uint32(0xFFFFFFFF) << shift), words)
    words = np.where(kind == 3, np.uint32(0xFFFFFFFF) << shift, words)
    return np.where(rng.random(shape) < 0.02, 0, words).astype(np.uint32)


def _wide_words(rng: np.random.Generator, *shape: int) -> NDArray[np.uint64]:
    high, low = _words(rng, *shape).astype(np.uint64), _words(rng, *shape).astype(np.uint64)
    return np.asarray(high << np.uint64(32) | low, np.uint64)


def _scaled(rng: np.random.Generator, low: int, high: int, *shape: int) -> NDArray[Any]:
    """Return float64 of both signs whose magnitude is 2 to a power from `low` to `high`."""
    sign = rng.choice([-1.0, 1.0], shape)
    power = rng.integers(low, high, shape).astype(np.float64)
    return np.asarray(sign * (1 + rng.random(shape)) * np.exp2(power))


def to_bf16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Return the bits of float64 or float32 values, cut to bfloat16 (not rounded)."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


_TILES = 12  # of each kind of an mma's operands
_Operands = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]


def _mma_kinds(rng: np.random.Generator) -> Iterator[_Operands]:
    """Yield A [tiles, 16, 16], B [tiles, 16, 8] and C [tiles, 16, 8] of different temper."""
    n = _TILES
    a, b, c = (n, 16, 16), (n, 16, 8), (n, 16, 8)
    normal = rng.standard_normal
    yield normal(a), normal(b), normal(c)
    yield normal(a), normal(b), np.zeros(c)
    yield rng.random(a), normal(b), 30 * normal(c)  # what attention does: weights times values
    yield rng.integers(-8, 9, a), rng.integers(-8, 9, b), rng.integers(-99, 99, c)
    for reach in (4, 20, 60):
        yield tuple(_scaled(rng, -reach, reach, *shape) for shape in (a, b, c))  # type: ignore[misc]
    left, right = normal(a), normal(b)
    left[..., 1::2] = left[..., ::2] * (1 + 2.0**-7 * (rng.random((n, 16, 8)) < 0.3))
    right[:, 1::2] = -right[:, ::2]
    yield left, right, 2.0**-10 * normal(c)  # most of it cancels
    for exponent in (8, 16, 24, 30):
        yield normal(a), normal(b), normal(c) * 2.0**exponent
    yield normal(a), normal(b), normal(c) * 2.0**-30
    left = np.exp2(-rng.integers(0, 30, a))
    yield left, rng.choice([-1.0, 1.0], b), rng.choice([-1.0, 0.0, 1.0], c)  # what is cut, and when
    yield _scaled(rng, -75, -55, *a), _scaled(rng, -75, -55, *b), _scaled(rng, -149, -120, *c)
    yield _scaled(rng, -133, -126, *a), _scaled(rng, 0, 120, *b), _scaled(rng, -140, 0, *c)
    yield _scaled(rng, 55, 64, *a), _scaled(rng, 55, 63, *b), _scaled(rng, 110, 127, *c)  # overflow
    zero = rng.choice([0.0, -0.0], a), rng.choice([0.0, -0.0, 1.0], b)
    yield *zero, rng.choice([0.0, -0.0], c)
    special = np.array([np.inf, -np.inf, np.nan, 0.0])
    odd = [
        np.where(rng.random(shape) < share, rng.choice(special, shape), normal(shape))
        for shape, share in ((a, 0.01), (b, 0.01), (c, 0.05))
    ]
    yield odd[0], odd[1], odd[2]


def fragments(
    a: NDArray[Any], b: NDArray[Any], c: NDArray[Any]
) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.float32]]:
    """Lay matrices out over the lanes of a warp, as the PTX ISA has it for m16n8k16.

    Parameters
    ----------
    a, b : ndarray of uint16 [n, 16, 16], [n, 16, 8]
        Bits of bfloat16 or of half precision.
    c : ndarray of float32 [n, 16, 8]

    Returns
    -------
    ndarray of uint32 [n, 32, 4], of uint32 [n, 32, 2], of float32 [n, 32, 4]
    """
    lane = np.arange(32)
    group, pair = lane // 4, lane % 4 * 2
    low, high = a.astype(np.uint32), a.astype(np.uint32)
    left = np.stack(
        [
            low[:, group + 8 * (i % 2), pair + 8 * (i // 2)]
            | high[:, group + 8 * (i % 2), pair + 8 * (i // 2) + 1] << 16
            for i in range(4)
        ],
        -1,
    )
    low = b.astype(np.uint32)
    right = np.stack(
        [low[:, pair + 8 * i, group] | low[:, pair + 8 * i + 1, group] << 16 for i in range(2)], -1
    )
    sums = np.stack([c[:, group + 8 * (i // 2), pair + i % 2] for i in range(4)], -1)
    return left.astype(np.uint32), right.astype(np.uint32), sums.astype(np.float32)


def _draw_mma(rng: np.random.Generator) -> Arrays:
    a, b, c = (np.concatenate(parts) for parts in zip(*_mma_kinds(rng), strict=True))
    left_bits, right_bits = to_bf16(a), to_bf16(b)
    for bits in (left_bits, right_bits):  # subnormal bfloat16, which few of the above are
        tiny = rng.random(bits.shape) < 0.005
        bits[tiny] = rng.integers(0, 2**7, int(tiny.sum())).astype(np.uint16)
    left, right, sums = fragments(left_bits, right_bits, c.astype(np.float32))
    return {"a": left, "b": right, "c": sums}


def _draw_mma_fp16(rng: np.random.Generator) -> Arrays:
    """Draw as for bf16 what half precision has numbers for."""
    kinds = [
        [operand[::2] for operand in kind]
        for kind in _mma_kinds(rng)
        if max(np.abs(kind[0]).max(), np.abs(kind[1]).max()) < 6e4
    ]
    a, b, c = (np.concatenate(parts) for parts in zip(*kinds, strict=True))
    left_bits, right_bits = (x.astype(np.float16).view(np.uint16) for x in (a, b))
    for bits in (left_bits, right_bits):
        tiny = rng.random(bits.shape) < 0.005
        bits[tiny] = rng.integers(0, 2**10, int(tiny.sum())).astype(np.uint16)
    left, right, sums = fragments(left_bits, right_bits, c.astype(np.float32))
    return {"a": left, "b": right, "c": sums}


def _draw_fp16_pairs(rng: np.random.Generator) -> Arrays:
    x = _draw_narrow(rng)["x"]
    return {"x": x, "y": _words(rng, len(x))}


def _draw_bf16_products(rng: np.random.Generator) -> Arrays:
    a, b = _words(rng, 3000), _words(rng, 3000)
    # what codes of e4m3 are before they are brought to their size
    code = np.arange(256, dtype=np.uint32)
    a[:256] = code % 128 << 4 | code // 128 << 15
    b[:256] = 0x7B807B80
    return {"a": a, "b": b}


def _draw_matrices(rng: np.random.Generator) -> Arrays:
    n = 32
    rows = np.stack([rng.permutation(32) for _ in range(n)])
    rows[n // 2 :] = rng.integers(0, 32, (n - n // 2, 32))  # rows may be asked for twice
    return {"x": _words(rng, n, 32, 4), "row": rows.astype(np.int32)}


def _draw_shuffles(rng: np.random.Generator) -> Arrays:
    n = 70
    return {
        "x": _words(rng, n, 32),
        "y": _wide_words(rng, n, 32),
        "from": rng.integers(-40, 80, (n, 32)).astype(np.int32),
        "by": np.arange(n, dtype=np.int32),
    }


def _draw_votes(rng: np.random.Generator) -> Arrays:
    n = 64
    mask = _words(rng, n)
    mask[: n // 2] = 0xFFFFFFFF
    return {"x": _words(rng, n, 32).view(np.int32), "mask": np.where(mask == 0, 1, mask)}


def _draw_block_votes(rng: np.random.Generator) -> Arrays:
    x = rng.integers(0, 64, (24, 64)).astype(np.int32)
    x[:8] |= 2
    x[8:16] &= ~1
    return {"x": x}


def _draw_async_copies(rng: np.random.Generator) -> Arrays:
    sizes = np.arange(17 * 16) % 17
    return {"x": _words(rng, len(sizes), 4), "bytes": sizes.astype(np.int32)}


def _draw_exponentials(rng: np.random.Generator) -> Arrays:
    steps = np.arange(-160, 140)
    x = np.concatenate(
        [
            _special_floats(),
            steps,
            np.nextafter(steps.astype(np.float32), np.float32(np.inf)),
            np.nextafter(steps.astype(np.float32), np.float32(-np.inf)),
            -126 * rng.random(3000),
            -rng.random(1000),
            300 * rng.random(1500) - 160,
            _scaled(rng, -30, 8, 1000),
        ]
    )
    return {"x": x.astype(np.float32)}


def _draw_narrow(rng: np.random.Generator) -> Arrays:
    words = _words(rng, 4000)
    # right between two bfloat16, right between two halves, and one bit off
    middle = words[:1500] & np.uint32(0xFFFF0000) | np.uint32(0x8000)
    middle[500:] ^= rng.choice([0, 1, 0x8000, 0x7FFF], 1000).astype(np.uint32)
    small = _scaled(rng, -26, 16, 1500).astype(np.float32).view(np.uint32)
    small = small & np.uint32(0xFFFFE000) | np.uint32(0x1000)
    small[500:] ^= rng.choice([0, 1, 0x1000, 0xFFF], 1000).astype(np.uint32)
    bits = np.concatenate([words, middle, small])
    return {"x": np.concatenate([_special_floats(), bits.view(np.float32)])}


def _draw_narrow_others(rng: np.random.Generator) -> Arrays:
    x = _scaled(rng, -30, 20, 2000)
    # close to the middle of two neighbours: a way through float32 would round twice
    fine = np.concatenate([x[:500].astype(np.float32).view(np.uint32)] * 2)
    fine[:500] = fine[:500] & np.uint32(0xFFFF0000) | np.uint32(0x8000)
    fine[500:] = fine[500:] & np.uint32(0xFFFFE000) | np.uint32(0x1000)
    middle = fine.view(np.float32).astype(np.float64)
    x = np.concatenate([x, middle, middle * (1 + 2.0**-40), middle * (1 - 2.0**-40)])
    x = np.concatenate([x, _special_floats(), [1e300, -1e300, 1e-300, 3.4028235677973366e38]])
    k = _words(rng, len(x)).view(np.int32).copy()
    k[:200] = 2**24 + np.arange(-100, 100)
    k[200:400] = (257 << np.arange(200) % 15) + rng.integers(-1, 2, 200)
    return {"x": x, "k": k}


def _draw_half_arithmetic(rng: np.random.Generator) -> Arrays:
    a, b = rng.integers(0, 2**16, (2, 4000)).astype(np.uint16)
    near = slice(0, 2500)  # exponents close to each other, where something happens
    b[near] = a[near] & 0x7F80 | b[near] & 0x807F
    return {"a": a, "b": b}


def _draw_integers(rng: np.random.Generator) -> Arrays:
    n = 2000
    s = _words(rng, n)
    s[: n // 2] = rng.integers(0, 70, n // 2)
    return {"a": _words(rng, n), "b": _words(rng, n), "s": s}


def _draw_bit_casts(rng: np.random.Generator) -> Arrays:
    x = np.concatenate([_special_floats().view(np.uint32), _words(rng, 1000)])
    return {"x": x, "y": _wide_words(rng, len(x))}


def _draw_whole_numbers(rng: np.random.Generator) -> Arrays:
    halves = np.arange(-400, 400) / 2
    edges = np.float32(2**31) * np.array([-2, -1, 1, 2], np.float32)
    x = np.concatenate(
        [_special_floats(), halves, edges, np.nextafter(edges, np.float32(0)),
         _scaled(rng, -3, 34, 1000)]
    )  # fmt: skip
    k = _words(rng, len(x)).view(np.int32)
    return {"x": x.astype(np.float32), "k": k}


def _draw_rounded_arithmetic(rng: np.random.Generator) -> Arrays:
    # results stay normal: the device flushes what does not, by an option that CuPy insists on
    a, b, c = (_scaled(rng, -20, 20, 3000).astype(np.float32) for _ in range(3))
    c[1000:2000] = -(a * b)[1000:2000]  # a fused sum of what is left of the product
    b[2000:2500] = -a[2000:2500]
    b[2500:] = -np.nextafter(a[2500:], np.float32(0))
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0], np.float32)
    grid = np.stack(np.meshgrid(special, special, special), -1).reshape(-1, 3)
    return {
        name: np.concatenate([drawn, grid[:, at]])
        for at, (name, drawn) in enumerate({"a": a, "b": b, "c": c}.items())
    }


def _draw_atomics(rng: np.random.Generator) -> Arrays:
    a, b = _words(rng, 600), _words(rng, 600)
    b[:100] = a[:100]
    return {"a": a, "b": b}


PROBES: tuple[Probe, ...] = (
    Probe("mma", ("ptx::mma_m16n8k16_bf16",), _draw_mma, "mma", 32, True),
    Probe(
        "matrices",
        ("ptx::ldmatrix_x4", "ptx::ldmatrix_x4_trans", "ptx::movmatrix_trans"),
        _draw_matrices,
        threads=32,
        tiles=True,
    ),
    Probe(
        "shuffles",
        ("__shfl_sync", "__shfl_xor_sync", "__shfl_up_sync", "__shfl_down_sync"),
        _draw_shuffles,
        threads=32,
        tiles=True,
    ),
    Probe(
        "votes",
        (
            "__ballot_sync",
            "__any_sync",
            "__all_sync",
            "__match_any_sync",
            "__reduce_add_sync",
            "__reduce_min_sync",
            "__reduce_max_sync",
            "__reduce_and_sync",
            "__reduce_or_sync",
            "__reduce_xor_sync",
        ),
        _draw_votes,
        threads=32,
        tiles=True,
    ),
    Probe(
        "block_votes",
        ("__syncthreads_count", "__syncthreads_and", "__syncthreads_or", "thread_anew"),
        _draw_block_votes,
        threads=64,
        tiles=True,
    ),
    Probe(
        "async_copies",
        ("ptx::cp_async16", "ptx::cp_async_commit", "ptx::cp_async_wait"),
        _draw_async_copies,
        threads=32,
    ),
    Probe(
        "wide_copies",
        ("load128", "load128_nc", "store128", "__ldg"),
        lambda rng: {"x": _words(rng, 500, 4)},
    ),
    Probe("exponentials", ("ptx::exp2_approx",), _draw_exponentials, "exp2"),
    Probe(
        "narrow",
        (
            "__float2bfloat16",
            "__float2bfloat16_rn",
            "__floats2bfloat162_rn",
            "__bfloat16_as_ushort",
            "__float2half",
            "__float2half_rn",
            "__floats2half2_rn",
            "__half_as_ushort",
            "bf16::pack",
        ),
        _draw_narrow,
    ),
    Probe("narrow_others", ("__nv_bfloat16", "__half"), _draw_narrow_others),
    Probe(
        "widen",
        ("__bfloat162float", "__ushort_as_bfloat16", "__half2float", "__ushort_as_half"),
        lambda rng: {"x": np.arange(2**16, dtype=np.uint16)},
        "float",
    ),
    Probe(
        "widen_pairs",
        (
            "bf16::first",
            "bf16::second",
            "__bfloat1622float2",
            "make_bfloat162",
            "make_half2",
            "__low2float",
            "__high2float",
            "__half22float2",
        ),
        lambda rng: {"x": _words(rng, 1500)},
        "float",
    ),
    Probe("half_arithmetic", ("operators of the 16-bit floats",), _draw_half_arithmetic, "counted"),
    Probe(
        "integers",
        (
            "__popc",
            "__popcll",
            "__clz",
            "__clzll",
            "__ffs",
            "__ffsll",
            "__brev",
            "__brevll",
            "__byte_perm",
            "__funnelshift_l",
            "__funnelshift_r",
            "__umulhi",
            "__mulhi",
            "__umul64hi",
            "min",
            "max",
        ),
        _draw_integers,
    ),
    Probe(
        "bit_casts",
        (
            "__float_as_uint",
            "__uint_as_float",
            "__float_as_int",
            "__int_as_float",
            "__double_as_longlong",
            "__longlong_as_double",
        ),
        _draw_bit_casts,
    ),
    Probe(
        "whole_numbers",
        ("__float2int_rn", "__float2int_rz", "__int2float_rn"),
        _draw_whole_numbers,
    ),
    Probe(
        "rounded_arithmetic",
        ("__fmaf_rn", "__fadd_rn", "__fmul_rn", "__fdiv_rn", "__fsqrt_rn", "__frcp_rn"),
        _draw_rounded_arithmetic,
        "float",
    ),
    Probe(
        "atomics",
        (
            "atomicAdd",
            "atomicSub",
            "atomicMin",
            "atomicMax",
            "atomicAnd",
            "atomicOr",
            "atomicXor",
            "atomicExch",
            "atomicInc",
            "atomicDec",
            "atomicCAS",
        ),
        _draw_atomics,
    ),
    Probe("mma_fp16", ("ptx::mma_m16n8k16_fp16",), _draw_mma_fp16, "mma", 32, True),
    Probe(
        "fp16_pairs", ("fp16::pack", "fp16::first", "fp16::second"), _draw_fp16_pairs, "float"
    ),
    Probe("bf16_products", ("ptx::mul_bf16x2",), _draw_bf16_products),
)  # fmt: skip
BY_NAME = {probe.kernel: probe for probe in PROBES}


def draw() -> dict[str, Arrays]:
    """Return the inputs of every probe, by probe and parameter; the same at every call."""
    drawn = {}
    for number, probe in enumerate(PROBES):
        with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN are meant
            inputs = probe.draw(np.random.default_rng((_SEED, number)))
        drawn[probe.kernel] = {name: np.ascontiguousarray(x) for name, x in inputs.items()}
    return drawn
