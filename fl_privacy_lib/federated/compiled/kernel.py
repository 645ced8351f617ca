"""The kernel: a client's local iterations, or a part of one.

The batch goes through in slices of `SLICE` examples, and everything between two of them is written
over, so the memory does not depend on the batch's size. A network is dense layers, with or without
two convolutions before them. A dense layer's weights lie as [outputs][inputs], rows padded to a
multiple of 16; what stands in the padding is noise that meets only zeros. Its gradients are never
formed one by one: that of an example is the outer product of its output's gradient g and its input
h, so its norm is ‖g‖ ‖h‖, and the clipped sum Σ f g hᵀ takes one pass.
"""

import math

import numpy as np

from fl_privacy_lib.federated.compiled import convolutions
from fl_privacy_lib.federated.compiled.gaussian import add_normals
from fl_privacy_lib.federated.compiled.network import SLICE
from fl_privacy_lib.federated.compiled.target import entry, inner
from fl_privacy_lib.federated.compiled.vectors import (
    W,
    add,
    at,
    fma,
    load,
    loads,
    spread,
    store,
    total,
    zeros,
)

FORWARD, BACKWARD, CLIP, SUM, STEP, EVERY = 1, 2, 4, 8, 16, 31  # phases
LARGEST = 32  # in a step: the noise is scaled with the largest norm that clipping has left
PIECE = 1024  # numbers that stay in the L1 cache between their noise and their step
TINY = np.float32(1e-25)  # smaller gradients of a logit count as zero: denormal numbers are slow


@inner
def dot(a, b, count):
    """Return Σ a b over `count` numbers, a multiple of 16."""
    sums, rest, blocks = zeros(4, 1), spread(0.0), count // (4 * W)
    for i in range(0, blocks * 4 * W, 4 * W):
        sums = fma(loads(4, 1, a, i, W, 0), loads(4, 1, b, i, W, 0), sums)
    for i in range(blocks * 4 * W, count, W):
        rest = fma(load(a, i), load(b, i), rest)
    return total(add(add(sums[0], sums[1]), add(add(sums[2], sums[3]), rest)))


@inner
def combine(out, factors, stride, vectors, row, count, width):
    """Add Σ factor · vector to `width` (a multiple of 16) numbers of out.

    The `count` factors lie `stride` apart, the vectors `row`.
    """
    for i in range(0, width, W):
        sums = load(out, i)
        for k in range(count):
            sums = fma(load(vectors, k * row + i), factors[k * stride], sums)
        store(out, i, sums)


@inner
def length(values, count):
    """Return a norm, summed in double precision: the square of a small number would be lost."""
    square = 0.0
    for i in range(count):
        square += float(values[i]) ** 2
    return math.sqrt(square)


@inner
def forward(m, shape, examples):
    """Run a slice of a batch, the examples at these places in x, up to its logits' gradients."""
    channels, side, size, layers = shape
    for b in range(len(examples)):
        if channels:
            convolutions.first_forward(
                m.x[examples[b]], channels, side, m.weights, size, m.middle[b], m.marks[b]
            )
        else:
            m.inputs[b, : m.widths[0]] = m.x[examples[b]]
    if channels:
        convolutions.second_forward(m, len(examples), size)
    for layer in range(layers):
        row, weights = m.rows[layer], at(m.weights, m.begins[2 * (channels > 0) + layer])
        for k in range(m.widths[layer + 1]):
            for b in range(len(examples)):
                value = dot(at(m.inputs[b], m.places[layer]), at(weights, k * row), row)
                negative = layer + 1 < layers and value <= 0
                m.inputs[b, m.places[layer + 1] + k] = 0.0 if negative else value
    for b in range(len(examples)):
        logits, gradient = at(m.inputs[b], m.places[layers]), at(m.gradients[b], m.places[layers])
        m.hits[0] += softmax(logits, m.y[examples[b]], m.widths[layers], gradient)


@inner
def softmax(logits, label, classes, out):
    """Write the gradient of an example's cross-entropy; return whether its label is predicted."""
    best = 0
    for k in range(1, classes):
        best = k if logits[k] > logits[best] else best
    others = np.float32(0)
    for k in range(classes):
        out[k] = math.exp(max(logits[k] - logits[best], np.float32(-60)))
        others += out[k] if k != label else np.float32(0)
    mass = others + out[label]
    out[label] = -others  # p − 1 would be lost where p is nearly 1
    for k in range(classes):
        out[k] = np.float32(0) if abs(out[k] / mass) < TINY else out[k] / mass
    return best == label


@inner
def backward(m, shape, examples, norms):
    """Form the gradients of a slice of which `forward` has run, and their norms [examples, M]."""
    channels, side, size, layers = shape
    convs = 2 * (channels > 0)
    for b in range(len(examples)):
        for layer in range(layers - 1, -1, -1):
            row, outputs = m.rows[layer], m.widths[layer + 1]
            h, back = at(m.inputs[b], m.places[layer]), at(m.gradients[b], m.places[layer])
            g = at(m.gradients[b], m.places[layer + 1])
            norms[b, convs + layer] = math.sqrt(dot(h, h, row)) * length(g, outputs)
            if layer + convs > 0:
                m.gradients[b, m.places[layer] : m.places[layer] + row] = 0
                combine(back, g, 1, at(m.weights, m.begins[convs + layer]), row, outputs, row)
                for i in range(row):
                    back[i] = 0.0 if h[i] == 0 else back[i]  # ReLU, and the padding
        if channels:
            first, second = at(m.convolutions[b], 0), at(m.convolutions[b], m.begins[1])
            convolutions.list_nonzero(m, b, size)
            convolutions.second_gradient(m, m.middle[b], size, second)
            convolutions.middle_gradient(m, size)
            convolutions.first_gradient(
                m.x[examples[b]], channels, side, m.middle_gradient, m.marks[b], size, first
            )
            norms[b, 0] = math.sqrt(dot(first, first, m.begins[1]))
            norms[b, 1] = math.sqrt(dot(second, second, m.begins[2] - m.begins[1]))


@inner
def clip(norms, bounds, over_all, factors):
    """Write the factors min(1, bound / norm) of each example and tensor; return the largest norm.

    With `over_all` a factor's norm is that over all tensors. What is returned is a single tensor's,
    behind the factors.
    """
    largest = np.float32(0)
    for b in range(len(norms)):
        whole = length(norms[b], len(bounds))
        for t in range(len(bounds)):
            norm = whole if over_all else float(norms[b, t])
            factors[b, t] = bounds[t] / norm if norm > bounds[t] else 1.0
            largest = max(largest, norms[b, t] * factors[b, t])
    return largest


@inner
def add_gradients(m, convs, factors):
    """Add a slice's gradients, each times its factor, to the sums."""
    count, tensors = factors.shape
    for t in range(convs):
        begin, size = m.begins[t], m.begins[t + 1] - m.begins[t]
        vectors = at(m.convolutions, begin)
        combine(
            at(m.sums, begin),
            at(factors, t),
            tensors,
            vectors,
            m.convolutions.shape[1],
            count,
            size,
        )
    for t in range(convs, tensors):
        layer, stride = t - convs, m.inputs.shape[1]
        h, g, row = (
            at(m.inputs, m.places[layer]),
            at(m.gradients, m.places[layer + 1]),
            m.rows[layer],
        )
        for k in range(m.widths[layer + 1]):
            for b in range(count):
                g[b * stride + k] *= factors[b, t]
            combine(at(m.sums, m.begins[t] + k * row), at(g, k), stride, h, stride, count, row)


@inner
def step(m, rate, batch_size, scale):
    """Add −rate · (sums / batch size + scale · noise) to the update, and set the weights."""
    for t in range(len(m.stds)):
        for begin in range(m.begins[t], m.begins[t + 1], PIECE):
            end = min(begin + PIECE, m.begins[t + 1])
            if m.stds[t] * scale > 0:
                add_normals(m.state, np.float32(-rate * m.stds[t] * scale), m.update, begin, end)
            for i in range(begin, end, W):
                update = fma(load(m.sums, i), np.float32(-rate / batch_size), load(m.update, i))
                store(m.update, i, update)
                store(m.weights, i, add(load(m.start, i), update))


@entry
def run(shape, m, iterations, phases, over_all, rate, batch_size):
    """Run the phases (a sum) of some local iterations.

    Parameters
    ----------
    shape : (channels, side, S, dense layers); no channels: no convolutions
    m : Memory
    over_all : whether a bound is compared with the norm over all tensors, instead of each one's
    rate, batch_size : what a step is multiplied with and divided by
    """
    convs = 2 * (shape[0] > 0)
    for iteration in range(iterations):
        if phases & FORWARD and convs:
            convolutions.transformed_weights(at(m.weights, m.begins[1]), m.tiles, m.transformed)
        if phases & SUM:
            m.sums[:] = 0
        begin, end, largest = m.ends[iteration], m.ends[iteration + 1], np.float32(0)
        for first in range(begin, end, SLICE):
            examples = m.positions[first : min(first + SLICE, end)]
            done = slice(first - begin, first - begin + len(examples))
            if phases & FORWARD:
                forward(m, shape, examples)
            if phases & BACKWARD:
                backward(m, shape, examples, m.norms[done])
            if phases & CLIP:
                largest = max(largest, clip(m.norms[done], m.bounds, over_all, m.factors[done]))
            if phases & SUM:
                add_gradients(m, convs, m.factors[done])
        if phases & STEP:
            step(m, rate, batch_size, largest if phases & LARGEST else np.float32(1))
