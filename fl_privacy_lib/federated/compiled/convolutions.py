"""The two convolutions of the papers' CNN with their ReLU and 2×2 maximum, forwards and backwards, exactly.

Sizes: C channels of an image side × side; T×T windows are pooled last, from S×S windows of the first convolution,
S = 2T + 2 (what only a dropped last row would have read is not computed). Layouts, inner axis last:

    image         [C][side][side]   as it comes
    first weights [C][tap][32]      so that a vector is of output channels, and a pixel a factor of it
    middle        [S][S][32]        the first convolution after ReLU and maximum
    second weights [2][64][tap][16] in halves of 16 input channels: half of them fit the L1 cache
    features      [T²][64]          the second convolution after ReLU and maximum

With each maximum goes a code: which of its window's four positions it came from (0–3), or 4 where ReLU set it to zero.
The second convolution runs forwards as Winograd's F(2×2, 3×3): a tile of four outputs, which is just one window to
pool, takes 16 products instead of 36. Backwards it goes through lists of what is not zero: at most one position of a
window has a gradient, and ReLU leaves a part of these.
"""

from fl_privacy_lib.federated.compiled.steps import ROWS, product
from fl_privacy_lib.federated.compiled.target import inner
from fl_privacy_lib.federated.compiled.vectors import (
    W,
    above,
    add,
    add_taps,
    after,
    choose,
    load,
    load_codes,
    loads,
    mul,
    same,
    spread,
    spread_int,
    squares,
    store,
    store_codes,
    stores,
    sub,
    taps,
    total,
    transposed,
    window_gradients,
    windows,
    zeros,
)

FIRST, SECOND, HALF = 32, 64, 16  # channels
CHANNEL = 9 * HALF  # floats between two output channels in a half of the second weights
PART = SECOND * CHANNEL  # floats in a half
SQUARE, WEIGHTS = W * W, FIRST * SECOND
TILE_ROWS, OUTPUT_ROWS = ROWS * FIRST, ROWS * SECOND  # floats of the tiles that go together, of their outputs


@inner
def pooled(a, b, c, d, zero, inactive):
    """Return the largest of four vectors after ReLU, and its code; what is no number stays so."""
    best, code = a, spread_int(0)
    more = above(b, best)
    best, code = choose(more, b, best), choose(more, spread_int(1), code)
    more = above(c, best)
    best, code = choose(more, c, best), choose(more, spread_int(2), code)
    more = above(d, best)
    best, code = choose(more, d, best), choose(more, spread_int(3), code)
    active = above(best, zero)
    return choose(active, best, zero), choose(active, code, inactive)


@inner
def first_forward(image, channels, side, weights, size, middle, marks):
    """Run the first convolution, ReLU and maximum: middle [size, size, 32] and its codes."""
    zero, inactive = spread(0.0), spread_int(4)
    for y in range(size):
        for x in range(size):
            place = (y * size + x) * FIRST
            for co in range(0, FIRST, 2 * W):
                s = zeros(8)
                for c in range(channels):
                    pixel = (c * side + 2 * y) * side + 2 * x
                    s = windows(s, weights, c * 9 * FIRST + co, image, pixel, side)
                value, code = pooled(s[0], s[1], s[2], s[3], zero, inactive)
                store(middle, place + co, value)
                store_codes(marks, place + co, code)
                value, code = pooled(s[4], s[5], s[6], s[7], zero, inactive)
                store(middle, place + co + W, value)
                store_codes(marks, place + co + W, code)


@inner
def first_gradient(image, channels, side, gradient, marks, size, out):
    """Add an example's gradient of the first weights to out, from the middle's gradient and codes."""
    zero = spread(0.0)
    for c in range(channels):
        for co in range(0, FIRST, W):
            sums = loads(9, out, c * 9 * FIRST + co, FIRST)
            for y in range(size):
                for x in range(size):
                    place = (y * size + x) * FIRST + co
                    g, code = load(gradient, place), load_codes(marks, place)
                    parts = (
                        choose(same(code, spread_int(0)), g, zero),
                        choose(same(code, spread_int(1)), g, zero),
                        choose(same(code, spread_int(2)), g, zero),
                        choose(same(code, spread_int(3)), g, zero),
                    )
                    sums = window_gradients(sums, parts, image, (c * side + 2 * y) * side + 2 * x, side)
            stores(sums, out, c * 9 * FIRST + co, FIRST)


# ---- the second convolution forwards


@inner
def input_line(a, b, c, d):
    """Return Bᵀ times four vectors."""
    return sub(a, c), add(b, c), sub(c, b), sub(b, d)


@inner
def weight_line(a, b, c, half):
    """Return G times three vectors."""
    ends = add(a, c)
    return a, mul(half, add(ends, b)), mul(half, sub(ends, b)), c


@inner
def output_line(a, b, c, d):
    """Return Aᵀ times four vectors."""
    return add(add(a, b), c), sub(sub(b, c), d)


@inner
def transformed_weights(weights, scratch, out):
    """Write Winograd's G g Gᵀ of all weights: out [16][32 inputs][64 outputs]. Scratch holds [tap][W][W]."""
    half = spread(0.5)
    for ci in range(0, FIRST, W):
        for co in range(0, SECOND, W):
            place = ci // HALF * PART + ci % HALF + co * CHANNEL
            for tap in range(9):
                block = transposed(loads(W, weights, place + tap * HALF, CHANNEL))
                stores(block, scratch, tap * SQUARE, W)
            for k in range(W):
                g = loads(9, scratch, k * W, SQUARE)
                p, q, r, s = weight_line(g[0], g[3], g[6], half)
                p1, q1, r1, s1 = weight_line(g[1], g[4], g[7], half)
                p2, q2, r2, s2 = weight_line(g[2], g[5], g[8], half)
                row = weight_line(p, p1, p2, half)
                row1 = weight_line(q, q1, q2, half)
                row2 = weight_line(r, r1, r2, half)
                row3 = weight_line(s, s1, s2, half)
                stores(row + row1 + row2 + row3, out, (ci + k) * SECOND + co, WEIGHTS)


@inner
def transformed_tile(middle, place, row, out, r):
    """Write Bᵀ d B of the 4×4 patch at `place` into row r of out [16][ROWS][32]."""
    for ci in range(0, FIRST, W):
        d = loads(4, middle, place + ci, FIRST)
        e = loads(4, middle, place + row + ci, FIRST)
        f = loads(4, middle, place + 2 * row + ci, FIRST)
        g = loads(4, middle, place + 3 * row + ci, FIRST)
        d0, e0, f0, g0 = input_line(d[0], e[0], f[0], g[0])
        d1, e1, f1, g1 = input_line(d[1], e[1], f[1], g[1])
        d2, e2, f2, g2 = input_line(d[2], e[2], f[2], g[2])
        d3, e3, f3, g3 = input_line(d[3], e[3], f[3], g[3])
        block = input_line(d0, d1, d2, d3) + input_line(e0, e1, e2, e3)
        stores(block + input_line(f0, f1, f2, f3) + input_line(g0, g1, g2, g3), out, r * FIRST + ci, TILE_ROWS)


@inner
def second_forward(middle, examples, size, transformed, v, m, features, marks):
    """Run the second convolution, ReLU and maximum of some examples: features [examples, T², 64] and codes.

    `ROWS` tiles go through together: v [16][ROWS][32] and m [16][ROWS][64] stay in the L1 cache.
    """
    zero, inactive = spread(0.0), spread_int(4)
    side = (size - 2) // 2
    tiles = side * side
    for first in range(0, examples * tiles, ROWS):
        for r in range(ROWS):
            n = min(first + r, examples * tiles - 1)  # the last rows may repeat a tile
            b, y, x = n // tiles, n % tiles // side, n % side
            transformed_tile(middle, ((b * size + 2 * y) * size + 2 * x) * FIRST, size * FIRST, v, r)
        for t in range(16):
            product(after(v, t * TILE_ROWS), FIRST, after(transformed, t * WEIGHTS), SECOND, FIRST,
                    after(m, t * OUTPUT_ROWS), SECOND)  # fmt: skip
        for r in range(min(ROWS, examples * tiles - first)):
            for co in range(0, SECOND, W):
                p = loads(16, m, r * SECOND + co, OUTPUT_ROWS)
                a0, c0 = output_line(p[0], p[4], p[8], p[12])
                a1, c1 = output_line(p[1], p[5], p[9], p[13])
                a2, c2 = output_line(p[2], p[6], p[10], p[14])
                a3, c3 = output_line(p[3], p[7], p[11], p[15])
                upper, lower = output_line(a0, a1, a2, a3), output_line(c0, c1, c2, c3)
                value, code = pooled(upper[0], upper[1], lower[0], lower[1], zero, inactive)
                place = (first + r) * SECOND + co
                store(features, place, value)
                store_codes(marks, place, code)


# ---- the second convolution backwards


@inner
def listed(gradient, marks, size, base, by_tile, by_channel, room):
    """List what is not zero of an example's features' gradient [T², 64], twice.

    by_tile : (values, places, counts); lists [T²][5 positions][64] of values, with their channels' places in the second
        weights; the fifth position collects what is zero; counts of each tile in bytes, packed into one integer
    by_channel : (values, places, counts); lists [64][room], with the places of their patches in the middle (from
        `base` on); they are appended to, so that several examples may share them
    """
    values, channels, packed = by_tile
    factors, patches, counts = by_channel
    side = (size - 2) // 2
    for tile in range(side * side):
        patch = base + (2 * (tile // side) * size + 2 * (tile % side)) * FIRST
        count = 0
        for co in range(SECOND):
            g, code = gradient[tile * SECOND + co], int(marks[tile * SECOND + co])
            code = 4 if g == 0 else code
            slot = (tile * 5 + code) * SECOND + (count >> (8 * code) & 255)
            values[slot], channels[slot] = g, co * CHANNEL
            count += 1 << (8 * code)
            slot = co * room + counts[co]
            factors[slot], patches[slot] = g, patch + ((code >> 1) * size + (code & 1)) * FIRST
            counts[co] += code < 4
        packed[tile] = count


@inner
def second_gradient(middle, size, by_channel, room, out):
    """Write the second weights' gradient of what is listed by channel, and return its square."""
    factors, patches, counts = by_channel
    square = spread(0.0)
    for ci in range(0, FIRST, W):
        for co in range(SECOND):
            sums = zeros(9)
            for e in range(co * room, co * room + counts[co]):
                sums = taps(sums, factors[e], middle, patches[e] + ci, size * FIRST, FIRST)
            square = squares(sums, square)
            stores(sums, out, ci // HALF * PART + ci % HALF + co * CHANNEL, HALF)
    return total(square)


@inner
def middle_gradient(weights, size, by_tile, out):
    """Write an example's gradient of the middle, from what is listed by tile."""
    values, channels, packed = by_tile
    side = (size - 2) // 2
    for i in range(0, size * size * FIRST, W):
        store(out, i, spread(0.0))
    for ci in range(0, FIRST, W):
        part = ci // HALF * PART + ci % HALF
        for tile in range(side * side):
            corner = (2 * (tile // side) * size + 2 * (tile % side)) * FIRST + ci
            for position in range(4):
                count = packed[tile] >> (8 * position) & 255
                if count == 0:
                    continue
                sums, slot = zeros(9), (tile * 5 + position) * SECOND
                for e in range(slot, slot + count):
                    sums = taps(sums, values[e], weights, part + channels[e], 3 * HALF, HALF)
                place = corner + ((position >> 1) * size + (position & 1)) * FIRST
                add_taps(sums, out, place, size * FIRST, FIRST)
