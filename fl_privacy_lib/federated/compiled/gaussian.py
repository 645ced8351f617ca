"""Gaussian noise: 16 generators side by side, and Box–Muller with polynomials.

Lane l draws with xoshiro128+ (Blackman and Vigna, 2021) from a state of its own. All 64 words come
from one `SeedSequence` of (seed, round, client), so a client's stream depends on nothing else. Two
draws of 16 words become 32 normals: z[0 … 15] = r cos θ and z[16 … 31] = r sin θ. Every step is one
that IEEE arithmetic fixes, and so are the bits of the stream, for any vector width. This is noise
for simulations: a release needs a hardened sampler.
"""

import numpy as np

from fl_privacy_lib.federated.compiled import vectors as v
from fl_privacy_lib.federated.compiled.target import inner
from fl_privacy_lib.federated.compiled.vectors import (
    W,
    add,
    both,
    fma,
    left,
    load,
    mul,
    right,
    store,
    sub,
    xor,
)

LANES = 16
STREAM = 3  # `sampling` has the streams 0, 1 and 2 of a seed
LOG = tuple(
    np.float32(c)
    for c in (
        7.0376836292e-2,
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    )
)
"""ln(1 + f) = f − f²/2 + f³ p(f) on [√½ − 1, √2 − 1]; all three are from Cephes (Moshier)."""
SIN = tuple(np.float32(c) for c in (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1))
COS = tuple(
    np.float32(c) for c in (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
)
LN_2, ANGLE, UNIT = np.float32(np.log(2)), np.float32(np.pi / 4 / 2**31), np.float32(2.0**-31)
ROOT_HALF, MANTISSA, SIGN = 0x3F3504F3, 0x007FFFFF, -(2**31)


def initial_state(seed: int, round: int, client: int) -> np.ndarray:
    """Return the state of a client's generators in a round, uint32 [4, 16]."""
    sequence = np.random.SeedSequence(seed, spawn_key=(STREAM, round, client))
    return sequence.generate_state(4 * LANES, np.uint32).reshape(4, LANES)


@inner
def word(a, b, c, d):
    """Return the next random integers and the state after them."""
    out, t = add(a, d), left(b, 9)
    c, d = xor(c, a), xor(d, b)
    b, a = xor(b, c), xor(a, d)
    return out, a, b, xor(c, t), add(left(d, 11), right(d, 21))


@inner
def normals(u, w):
    """Return two vectors of independent N(0, 1) from two of random integers."""
    # r² = −2 ln x for x = (31 bits + 1) / 2³¹ in (0, 1]
    x = fma(v.to_float(right(u, 1)), UNIT, UNIT)
    bits = sub(v.as_int(x), ROOT_HALF)
    f = sub(v.as_float(add(both(bits, MANTISSA), ROOT_HALF)), 1.0)
    p = v.spread(LOG[0])
    for i in range(1, 9):
        p = fma(p, f, LOG[i])
    ln = fma(mul(f, f), fma(f, p, -0.5), f)
    r = v.root(mul(fma(v.to_float(v.right_signed(bits, 23)), LN_2, ln), -2.0))
    # 30 bits for an angle within ±π/4, one to exchange sine and cosine, one for the cosine's sign:
    # a whole circle
    angle = mul(v.to_float(left(w, 2)), ANGLE)
    q = mul(angle, angle)
    sine = fma(mul(fma(fma(q, SIN[0], SIN[1]), q, SIN[2]), q), angle, angle)
    cosine = fma(mul(fma(fma(q, COS[0], COS[1]), q, COS[2]), q), q, fma(q, -0.5, 1.0))
    cosine = v.as_float(xor(v.as_int(cosine), both(w, SIGN)))
    straight = v.same(both(w, 1 << 30), 0)
    return mul(r, v.choose(straight, cosine, sine)), mul(r, v.choose(straight, sine, cosine))


@inner
def add_normals(state, scale, out, begin, end):
    """Add scale times a normal to the numbers begin … end − 1 of out, and move the state on.

    The count is a multiple of 32.
    """
    for q in range(0, LANES, W):
        a, b, c, d = v.loads(4, 1, state, q, LANES, 0)
        for i in range(begin + q, end, 32):
            one, a, b, c, d = word(a, b, c, d)
            other, a, b, c, d = word(a, b, c, d)
            z, y = normals(one, other)
            store(out, i, fma(z, scale, load(out, i)))
            store(out, i + 16, fma(y, scale, load(out, i + 16)))
        v.stores((a, b, c, d), 1, state, q, LANES, 0)
