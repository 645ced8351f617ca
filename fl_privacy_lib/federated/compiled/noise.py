"""Gaussian noise: 16 generators side by side, and Box–Muller with polynomials.

Lane l draws with xoshiro128+ (Blackman and Vigna, 2021) from a state of its own. All 64 words come from one
`SeedSequence` of (seed, round, client), so a client's stream depends on nothing else. Two draws of 16 words become 32
normals: z[0 … 15] = r cos θ and z[16 … 31] = r sin θ. Every step is one that IEEE arithmetic fixes, and so are the bits
of the stream, for any vector width. This is noise for simulations: a release needs a hardened sampler.
"""

import numpy as np

from fl_privacy_lib.federated.compiled.target import entry, inner
from fl_privacy_lib.federated.compiled.vectors import (
    W,
    add,
    as_float,
    as_int,
    both,
    choose,
    floats,
    fma,
    ints,
    left,
    load_ints,
    mul,
    right,
    right_signed,
    root,
    same,
    spread,
    spread_int,
    store,
    store_ints,
    sub,
    to_float,
    xor,
)

LANES = 16
STREAM = 3  # `sampling` has the streams 0, 1 and 2 of a seed
LOG = tuple(np.float32(c) for c in (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1))  # fmt: skip
"""ln(1 + f) = f − f²/2 + f³ p(f) on [√½ − 1, √2 − 1]; this and the next two from the Cephes library (Moshier)."""
SIN = tuple(np.float32(c) for c in (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1))
COS = tuple(np.float32(c) for c in (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2))
LN_2, ANGLE = np.float32(np.log(2)), np.float32(np.pi / 4 / 2**31)
UNIT, HALF, ONE, MINUS_TWO = np.float32(2.0**-31), np.float32(-0.5), np.float32(1), np.float32(-2)
ROOT_HALF, MANTISSA, SIGN = 0x3F3504F3, 0x007FFFFF, -(2**31)


def seeded(seed: int, round: int, client: int) -> np.ndarray:
    """Return the state of a client's generators in a round, uint32 [4, 16]."""
    sequence = np.random.SeedSequence(seed, spawn_key=(STREAM, round, client))
    return sequence.generate_state(4 * LANES, np.uint32).reshape(4, LANES)


@inner
def word(a, b, c, d):
    """Return the next random integers and the state after them."""
    out = add(a, d)
    t = left(b, 9)
    c, d = xor(c, a), xor(d, b)
    b, a = xor(b, c), xor(a, d)
    c = xor(c, t)
    d = add(left(d, 11), right(d, 21))
    return out, a, b, c, d


@inner
def normals(u, v):
    """Return two vectors of independent N(0, 1) from two of random integers."""
    # r² = −2 ln x for x = (31 bits + 1) / 2³¹ in (0, 1]
    x = fma(to_float(right(u, 1)), spread(UNIT), spread(UNIT))
    bits = sub(as_int(x), spread_int(ROOT_HALF))
    exponent = to_float(right_signed(bits, 23))
    f = sub(as_float(add(both(bits, spread_int(MANTISSA)), spread_int(ROOT_HALF))), spread(ONE))
    p = spread(LOG[0])
    for i in range(1, 9):
        p = fma(p, f, spread(LOG[i]))
    ff = mul(f, f)
    ln = fma(ff, fma(f, p, spread(HALF)), f)
    r = root(mul(spread(MINUS_TWO), fma(exponent, spread(LN_2), ln)))
    # 30 bits for an angle within ±π/4, one to exchange sine and cosine, one for the cosine's sign: a whole circle
    angle = mul(to_float(left(v, 2)), spread(ANGLE))
    q = mul(angle, angle)
    s = fma(fma(spread(SIN[0]), q, spread(SIN[1])), q, spread(SIN[2]))
    sine = fma(mul(s, q), angle, angle)
    c = fma(fma(spread(COS[0]), q, spread(COS[1])), q, spread(COS[2]))
    cosine = fma(mul(c, q), q, fma(q, spread(HALF), spread(ONE)))
    cosine = as_float(xor(as_int(cosine), both(v, spread_int(SIGN))))
    straight = same(both(v, spread_int(1 << 30)), spread_int(0))
    return mul(r, choose(straight, cosine, sine)), mul(r, choose(straight, sine, cosine))


@entry
def draw(state, out, count):
    """Fill an array at the address `out` with `count` normals (a multiple of 32) and move the state on."""
    state, out = ints(state), floats(out)
    for q in range(0, LANES, W):
        a, b = load_ints(state, q), load_ints(state, q + 16)
        c, d = load_ints(state, q + 32), load_ints(state, q + 48)
        for i in range(q, count, 32):
            u, a, b, c, d = word(a, b, c, d)
            v, a, b, c, d = word(a, b, c, d)
            z, other = normals(u, v)
            store(out, i, z)
            store(out, i + 16, other)
        store_ints(state, q, a)
        store_ints(state, q + 16, b)
        store_ints(state, q + 32, c)
        store_ints(state, q + 48, d)
