"""The two convolutions of the papers' CNN with their ReLU and 2×2 maximum, both ways, exactly.

Sizes: C channels of an image side × side; T×T windows are pooled last, from S×S windows of the
first convolution, S = 2T + 2 (what only a dropped last row would have read is not computed).
Layouts, inner axis last:

    image          [C][side][side]    as it comes
    first weights  [C][tap][32]       a vector is of output channels, and a pixel a factor of it
    middle         [S][S][32]         the first convolution after ReLU and maximum
    second weights [2][64][tap][16]   in halves of 16 input channels: a half fits the L1 cache
    features       [T²][64]           the second convolution after ReLU and maximum

With each maximum goes a code: which of its window's four positions it came from (0–3), or 4 where
ReLU set it to zero. The second convolution runs forwards as Winograd's F(2×2, 3×3): a tile of four
outputs, which is just one window to pool, takes 16 products instead of 36. Backwards it goes
through lists of what is not zero: at most one position of a window has a gradient, and ReLU leaves
a part of these.
"""

from fl_privacy_lib.federated.compiled import vectors as v
from fl_privacy_lib.federated.compiled.network import FIRST, HALF, ROWS, SECOND
from fl_privacy_lib.federated.compiled.target import inner
from fl_privacy_lib.federated.compiled.vectors import (
    W,
    add,
    at,
    fma,
    load,
    loads,
    store,
    stores,
    sub,
    zeros,
)

CHANNEL = 9 * HALF  # floats between two output channels in a half of the second weights
PART = SECOND * CHANNEL  # floats in a half
SQUARE, WEIGHTS = W * W, FIRST * SECOND
# floats of the tiles that go together, and of their outputs
TILE_ROWS, OUTPUT_ROWS = ROWS * FIRST, ROWS * SECOND
# of a product's block: 24 sums of AVX-512's 32 registers, 12 of the others' 16
COLUMNS = 4 if W == 16 else 2


@inner
def larger(best, code, other, position):
    """Return the larger of two vectors, NaN first, and the position that it came from."""
    more = v.above(other, best)
    return v.choose(more, other, best), v.choose(more, position, code)


@inner
def pool(window, out, codes, place):
    """Write the largest of a window's four vectors after ReLU, and its code; NaN stays NaN."""
    best, code = larger(window[0], v.spread_int(0), window[1], 1)
    best, code = larger(best, code, window[2], 2)
    best, code = larger(best, code, window[3], 3)
    active = v.above(best, 0.0)
    store(out, place, v.choose(active, best, 0.0))
    store(codes, place, v.choose(active, code, 4))


@inner
def first_forward(image, channels, side, weights, size, middle, codes):
    """Run the first convolution, ReLU and maximum: middle [S, S, 32] and its codes."""
    for y in range(size):
        for x in range(size):
            for co in range(0, FIRST, W):
                sums = zeros(4, 1)
                for c in range(channels):
                    for tap in range(9):
                        pixel = (c * side + 2 * y + tap // 3) * side + 2 * x + tap % 3
                        weight = load(weights, (c * 9 + tap) * FIRST + co)
                        sums = fma(v.numbers(2, 2, image, pixel, side, 1), weight, sums)
                pool(sums, middle, codes, (y * size + x) * FIRST + co)


@inner
def first_gradient(image, channels, side, gradient, codes, size, out):
    """Write an example's gradient of the first weights, from the middle's gradient and codes."""
    for c in range(channels):
        for co in range(0, FIRST, W):
            sums = zeros(9, 1)
            for y in range(size):
                for x in range(size):
                    place = (y * size + x) * FIRST + co
                    g, code = load(gradient, place), load(codes, place)
                    for position in range(4):
                        pixel = (c * side + 2 * y + position // 2) * side + 2 * x + position % 2
                        part = v.choose(v.same(code, position), g, 0.0)
                        sums = fma(v.numbers(3, 3, image, pixel, side, 1), part, sums)
            stores(sums, 1, out, c * 9 * FIRST + co, FIRST, 0)


# ---- the second convolution forwards: Winograd's matrices from one side, on the rows of a block
# ---- [rows, 3 or 4], whose transpose is returned, so that twice is from both sides


@inner
def input_side(p):
    """Return (Bᵀ p)ᵀ."""
    a, b, c, d = p[0::4], p[1::4], p[2::4], p[3::4]
    return sub(a, c) + add(b, c) + sub(c, b) + sub(b, d)


@inner
def weight_side(p):
    """Return (G p)ᵀ."""
    ends = add(p[0::3], p[2::3])
    return p[0::3] + v.mul(add(ends, p[1::3]), 0.5) + v.mul(sub(ends, p[1::3]), 0.5) + p[2::3]


@inner
def output_side(p):
    """Return (Aᵀ p)ᵀ."""
    a, b, c, d = p[0::4], p[1::4], p[2::4], p[3::4]
    return add(add(a, b), c) + sub(sub(b, c), d)


@inner
def transformed_weights(weights, scratch, out):
    """Write Winograd's G g Gᵀ of all weights: out [16][32 inputs][64 outputs].

    Scratch holds [tap][W][W].
    """
    for ci in range(0, FIRST, W):
        for co in range(0, SECOND, W):
            place = ci // HALF * PART + ci % HALF + co * CHANNEL
            for tap in range(9):
                block = v.transposed(loads(W, 1, weights, place + tap * HALF, CHANNEL, 0))
                stores(block, 1, scratch, tap * SQUARE, W, 0)
            for k in range(W):
                g = loads(3, 3, scratch, k * W, 3 * SQUARE, SQUARE)
                stores(weight_side(weight_side(g)), 1, out, (ci + k) * SECOND + co, WEIGHTS, 0)


@inner
def second_forward(m, examples, size):
    """Run the second convolution, ReLU and maximum: features [examples, T², 64] and codes.

    `ROWS` tiles go through together: tiles [16][ROWS][32] and outputs [16][ROWS][64] stay in the L1
    cache.
    """
    side = (size - 2) // 2
    tiles, row = side * side, size * FIRST
    count = examples * tiles
    for first in range(0, count, ROWS):
        for r in range(ROWS):
            n = min(first + r, count - 1)  # the last rows may repeat a tile
            b, y, x = n // tiles, n % tiles // side, n % side
            for ci in range(0, FIRST, W):
                patch = loads(
                    4, 4, m.middle, (b * size + 2 * y) * row + 2 * x * FIRST + ci, row, FIRST
                )
                stores(input_side(input_side(patch)), 1, m.tiles, r * FIRST + ci, TILE_ROWS, 0)
        for t in range(16):
            for j in range(0, SECOND, COLUMNS * W):
                sums = zeros(ROWS, COLUMNS)
                for k in range(FIRST):
                    column = v.numbers(ROWS, 1, m.tiles, t * TILE_ROWS + k, FIRST, 0)
                    sums = v.outer(
                        sums,
                        column,
                        loads(1, COLUMNS, m.transformed, t * WEIGHTS + k * SECOND + j, 0, W),
                    )
                stores(sums, COLUMNS, m.outputs, t * OUTPUT_ROWS + j, SECOND, W)
        for r in range(min(ROWS, count - first)):
            for co in range(0, SECOND, W):
                window = output_side(
                    output_side(
                        loads(4, 4, m.outputs, r * SECOND + co, 4 * OUTPUT_ROWS, OUTPUT_ROWS)
                    )
                )
                b, tile = (first + r) // tiles, (first + r) % tiles
                pool(window, m.inputs[b], m.feature_marks[b], tile * SECOND + co)


# ---- the second convolution backwards


@inner
def list_nonzero(m, b, size):
    """List what is not zero of the gradient [T², 64] of a slice's example b, twice.

    by tile : lists [T²][5 positions][64] of values, with their channels' places in the second
        weights; the fifth position collects what is zero; counts of each tile in bytes, packed into
        one integer
    by channel : lists [64][T²] of values, with the places of their patches in the middle
    """
    values, channels, packed = at(m.tile_values, 0), at(m.tile_channels, 0), at(m.tile_counts, 0)
    factors, patches, counts = (
        at(m.channel_values, 0),
        at(m.channel_patches, 0),
        at(m.channel_counts, 0),
    )
    gradient, marks, side = at(m.gradients[b], 0), at(m.feature_marks[b], 0), (size - 2) // 2
    m.channel_counts[:] = 0
    for tile in range(side * side):
        patch = (2 * (tile // side) * size + 2 * (tile % side)) * FIRST
        count = 0
        for co in range(SECOND):
            g, code = gradient[tile * SECOND + co], int(marks[tile * SECOND + co])
            code = 4 if g == 0 else code
            slot = (tile * 5 + code) * SECOND + (count >> (8 * code) & 255)
            values[slot], channels[slot] = g, co * CHANNEL
            count += 1 << (8 * code)
            slot = co * side * side + counts[co]
            factors[slot], patches[slot] = g, patch + ((code >> 1) * size + (code & 1)) * FIRST
            counts[co] += code < 4
        packed[tile] = count


@inner
def second_gradient(m, middle, size, out):
    """Write the second weights' gradient of what is listed by channel."""
    factors, patches, counts = (
        at(m.channel_values, 0),
        at(m.channel_patches, 0),
        at(m.channel_counts, 0),
    )
    room = ((size - 2) // 2) ** 2
    for ci in range(0, FIRST, W):
        for co in range(SECOND):
            sums = zeros(9, 1)
            for e in range(co * room, co * room + counts[co]):
                sums = fma(
                    loads(3, 3, middle, patches[e] + ci, size * FIRST, FIRST), factors[e], sums
                )
            stores(sums, 1, out, ci // HALF * PART + ci % HALF + co * CHANNEL, HALF, 0)


@inner
def middle_gradient(m, size):
    """Write an example's gradient of the middle, from what is listed by tile."""
    values, channels, packed = at(m.tile_values, 0), at(m.tile_channels, 0), at(m.tile_counts, 0)
    weights, side, row = at(m.weights, m.begins[1]), (size - 2) // 2, size * FIRST
    m.middle_gradient[:] = 0
    for ci in range(0, FIRST, W):
        part = ci // HALF * PART + ci % HALF
        for tile in range(side * side):
            for position in range(4):
                count = packed[tile] >> (8 * position) & 255
                if count == 0:
                    continue
                sums, slot = zeros(9, 1), (tile * 5 + position) * SECOND
                for e in range(slot, slot + count):
                    sums = fma(
                        loads(3, 3, weights, part + channels[e], 3 * HALF, HALF), values[e], sums
                    )
                y, x = 2 * (tile // side) + (position >> 1), 2 * (tile % side) + (position & 1)
                place = y * row + x * FIRST + ci
                sums = add(sums, loads(3, 3, m.middle_gradient, place, row, FIRST))
                stores(sums, 3, m.middle_gradient, place, row, FIRST)
