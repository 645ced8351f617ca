"""What both networks share: products, the clipping factors, and the noisy step.

A network's weights lie in one memory of P floats, tensor after tensor, each padded to a multiple of 32. Beside it lie
the global weights, the way gone since (kept apart: their difference would be lost in the weights' rounding), and the
sum of a batch's clipped gradients. A kernel gets the addresses of all memories as a `Memory`.
"""

import math
from collections import namedtuple

import numpy as np

from fl_privacy_lib.federated.compiled.noise import LANES, normals, word
from fl_privacy_lib.federated.compiled.target import inner
from fl_privacy_lib.federated.compiled.vectors import (
    W,
    add,
    after,
    axpy,
    floats,
    fma,
    ints,
    load,
    load_ints,
    loads,
    longs,
    multiply_add,
    outer,
    spread,
    store,
    store_ints,
    stores,
    total,
    zeros,
)

ROWS, COLUMNS = 6, 4 if W == 16 else 2  # of a product's block: 24 sums of AVX-512's 32 registers, 12 of the others' 16
BLOCK = ROWS * COLUMNS
BEGIN, MEASURE, FACTORS, ADD, STEP, CLASSIFY = 1, 2, 4, 8, 16, 32
TRAIN = BEGIN | MEASURE | FACTORS | ADD | STEP
NONE, LAYER, ALL = 0, 1, 2  # what a clipping bound is compared with
TINY = np.float32(1e-25)  # smaller gradients of a logit count as zero: denormal numbers are slow


Memory = namedtuple("Memory", "x y positions ends weights start way sums tensors state bounds stds norms factors "
                    "logits hits")  # fmt: skip
"""The addresses of what a participation reads and writes.

x, y : all examples, float32 [N, …], and labels, int64 [N]
positions, ends : every batch's positions in x, one after another, and where each batch begins and ends [L + 1]
weights, start, way, sums : float32 [P]
tensors : where each of the M tensors begins, and P, int64 [M + 1]
state : the noise's, uint32 [4, 16]
bounds, stds : of each tensor, float32 [M]: what it is clipped to, and its noise on the batch's mean
norms, factors : of each example of a batch and each tensor, float32 [B, M]
logits : float32 [slice, classes]
hits : the number of right answers, int64 [1]
"""


@inner
def product(a, stride, b, width, depth, out, out_stride):
    """Write a · b for `ROWS` rows of a, [ROWS, depth] · [depth, width] (a multiple of W)."""
    j = 0
    while j + COLUMNS * W <= width:
        sums = zeros(BLOCK)
        for k in range(depth):
            sums = outer(sums, ROWS, a, k, stride, b, k * width + j)
        for r in range(ROWS):
            for v in range(COLUMNS):
                store(out, r * out_stride + j + v * W, sums[r * COLUMNS + v])
        j += COLUMNS * W
    while j < width:
        column = zeros(ROWS)
        for k in range(depth):
            column = outer(column, ROWS, a, k, stride, b, k * width + j)
        for r in range(ROWS):
            store(out, r * out_stride + j, column[r])
        j += W


@inner
def dot(a, i, b, j, count):
    """Return Σ a b over `count` numbers, a multiple of W."""
    sums, k = zeros(4), 0
    while k + 4 * W <= count:
        sums = multiply_add(sums, loads(4, a, i + k, W), loads(4, b, j + k, W))
        k += 4 * W
    one = zeros(1)
    while k < count:
        one = multiply_add(one, loads(1, a, i + k, W), loads(1, b, j + k, W))
        k += W
    return total(add(add(add(sums[0], sums[1]), add(sums[2], sums[3])), one[0]))


@inner
def combine(out, factors, stride, rows, row, count, width):
    """Add Σ factor · row to `width` (a multiple of W) numbers of out.

    The `count` factors lie `stride` apart, the rows `row`.
    """
    i = 0
    while i + 4 * W <= width:
        sums = loads(4, out, i, W)
        for k in range(count):
            sums = axpy(sums, factors[k * stride], loads(4, rows, k * row + i, W))
        stores(sums, out, i, W)
        i += 4 * W
    while i < width:
        one = loads(1, out, i, W)
        for k in range(count):
            one = axpy(one, factors[k * stride], loads(1, rows, k * row + i, W))
        stores(one, out, i, W)
        i += W


@inner
def clear(out, count):
    """Set `count` numbers to zero."""
    for i in range(count):
        out[i] = 0.0


@inner
def softmax(logits, label, classes):
    """Turn an example's logits into the gradient of its cross-entropy, and return that gradient's norm."""
    largest = logits[0]
    for k in range(1, classes):
        largest = max(largest, logits[k])
    others = np.float32(0)
    for k in range(classes):
        logits[k] = math.exp(max(logits[k] - largest, np.float32(-60)))
        if k != label:
            others += logits[k]
    mass = others + logits[label]
    logits[label] = -others  # p − 1 would be lost where p is nearly 1
    square = np.float64(0)  # in double precision: the square of a small number would be lost
    for k in range(classes):
        g = logits[k] / mass
        if abs(g) < TINY:
            g = np.float32(0)
        logits[k] = g
        square += np.float64(g) ** 2
    return math.sqrt(square)


@inner
def score(m, first, count, classes):
    """Count the examples of a slice whose largest logit is their label's."""
    for b in range(count):
        logits, best = after(floats(m.logits), b * classes), 0
        for k in range(1, classes):
            if logits[k] > logits[best]:
                best = k
        longs(m.hits)[0] += best == longs(m.y)[longs(m.positions)[first + b]]


@inner
def clip(m, first, count, tensors, scope):
    """Write the factors min(1, bound / norm) of some examples; without a clip, ones."""
    norms, factors, bounds = floats(m.norms), floats(m.factors), floats(m.bounds)
    for b in range(first, first + count):
        whole = np.float64(0)
        for t in range(tensors):
            whole += np.float64(norms[b * tensors + t]) ** 2
        for t in range(tensors):
            norm = math.sqrt(whole) if scope == ALL else np.float64(norms[b * tensors + t])
            shrunk = scope != NONE and norm > bounds[t]
            factors[b * tensors + t] = np.float32(bounds[t] / norm) if shrunk else np.float32(1)


@inner
def step(m, tensors, rate, batch_size):
    """Go −rate · (sums / batch size + noise) further along the way, and set the weights."""
    sums, way, start, weights = floats(m.sums), floats(m.way), floats(m.start), floats(m.weights)
    begins, stds, state = longs(m.tensors), floats(m.stds), ints(m.state)
    mean = spread(np.float32(-rate / batch_size))
    for q in range(0, LANES, W):
        a, b = load_ints(state, q), load_ints(state, q + 16)
        c, d = load_ints(state, q + 32), load_ints(state, q + 48)
        for t in range(tensors):
            noise, noisy = spread(np.float32(-rate * stds[t])), stds[t] > 0
            for i in range(begins[t] + q, begins[t + 1], 32):
                w, v = load(way, i), load(way, i + 16)
                if noisy:
                    one, a, b, c, d = word(a, b, c, d)
                    other, a, b, c, d = word(a, b, c, d)
                    z, y = normals(one, other)
                    w, v = fma(noise, z, w), fma(noise, y, v)
                w, v = fma(mean, load(sums, i), w), fma(mean, load(sums, i + 16), v)
                store(way, i, w)
                store(way, i + 16, v)
                store(weights, i, add(load(start, i), w))
                store(weights, i + 16, add(load(start, i + 16), v))
        store_ints(state, q, a)
        store_ints(state, q + 16, b)
        store_ints(state, q + 32, c)
        store_ints(state, q + 48, d)
