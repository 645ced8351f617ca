"""The kernel of the papers' multilayer perceptron: a client's local iterations, or a part of one.

A layer's weights lie as [inputs][outputs], so that a vector is of outputs, each row padded to a multiple of 16. What
stands in the padding is noise that nobody reads. No gradient of a single example is formed: it is the outer product of
the layer's input h and its output's gradient g, so its norm is ‖h‖ ‖g‖, and the clipped sum Σ f h gᵀ takes one pass.
"""

import math
from collections import namedtuple

from fl_privacy_lib.federated.compiled.steps import (
    ADD,
    BEGIN,
    CLASSIFY,
    FACTORS,
    MEASURE,
    NONE,
    ROWS,
    STEP,
    clear,
    clip,
    combine,
    dot,
    product,
    score,
    softmax,
    step,
)
from fl_privacy_lib.federated.compiled.target import entry, inner
from fl_privacy_lib.federated.compiled.vectors import after, floats, longs

SLICE = 4 * ROWS  # examples


Work = namedtuple("Work", "inputs gradients")
"""The addresses of every layer's input [SLICE, width] and of its gradient, layer after layer, rows padded."""


def padded(width: int) -> int:
    """Return the width of a row in memory."""
    return -(-width // 16) * 16


def sizes(widths: tuple[int, ...]) -> Work:
    """Return how many bytes each memory takes."""
    count = 4 * SLICE * sum(map(padded, widths))
    return Work(count, count)


row_width = inner(padded)


@inner
def forward(m, w, layers, widths, first, count):
    """Run a slice of a batch, which begins at place `first` of all positions, up to its logits."""
    x, positions, begins, weights = floats(m.x), longs(m.positions), longs(m.tensors), floats(m.weights)
    h, row = floats(w.inputs), row_width(widths[0])
    for b in range(count):
        example = positions[first + b] * widths[0]
        for i in range(widths[0]):
            h[b * row + i] = x[example + i]
        for i in range(widths[0], row):
            h[b * row + i] = 0.0
    for layer in range(layers):
        out, width = after(h, SLICE * row), row_width(widths[layer + 1])
        for b in range(0, count, ROWS):
            matrix = after(weights, begins[layer])
            product(after(h, b * row), row, matrix, width, widths[layer], after(out, b * width), width)
        for b in range(count):
            for j in range(width):
                value = out[b * width + j]
                dead = j >= widths[layer + 1] or (layer + 1 < layers and value <= 0)
                out[b * width + j] = 0.0 if dead else value
        h, row = out, width
    logits, classes = floats(m.logits), widths[layers]
    for b in range(count):
        for k in range(classes):
            logits[b * classes + k] = h[b * row + k]


@inner
def measure(m, w, layers, widths, first, done, count, apart):
    """Take the gradients of a slice of which `forward` has run back through the layers, and form their norms."""
    y, positions, begins, weights = longs(m.y), longs(m.positions), longs(m.tensors), floats(m.weights)
    logits, norms, classes = floats(m.logits), floats(m.norms), widths[layers]
    place = 0
    for layer in range(layers):
        place += SLICE * row_width(widths[layer])
    h, g, row = after(floats(w.inputs), place), after(floats(w.gradients), place), row_width(classes)
    clear(g, count * row)
    for b in range(count):
        softmax(after(logits, b * classes), y[positions[first + b]], classes)
        for k in range(classes):
            g[b * row + k] = logits[b * classes + k]
    for layer in range(layers - 1, -1, -1):
        width = row_width(widths[layer])
        h, back = after(h, -SLICE * width), after(g, -SLICE * width)
        if apart:
            for b in range(count):
                square = dot(h, b * width, h, b * width, width)
                norms[(done + b) * layers + layer] = math.sqrt(square) * length(after(g, b * row), widths[layer + 1])
        if layer == 0:
            break
        clear(back, count * width)
        for i in range(widths[layer]):
            for b in range(count):
                if h[b * width + i] != 0:
                    back[b * width + i] = dot(weights, begins[layer] + i * row, g, b * row, row)
        g, row = back, width


@inner
def length(values, count):
    """Return the norm of `count` numbers, summed in double precision."""
    square = 0.0
    for i in range(count):
        square += float(values[i]) ** 2
    return math.sqrt(square)


@inner
def add(m, w, layers, widths, done, count):
    """Add a slice's gradients, each times its factor, to the sums."""
    sums, factors, begins = floats(m.sums), floats(m.factors), longs(m.tensors)
    h, g, row = floats(w.inputs), floats(w.gradients), row_width(widths[0])
    for layer in range(layers):
        width = row_width(widths[layer + 1])
        g = after(g, SLICE * row)
        for b in range(count):
            for j in range(widths[layer + 1]):
                g[b * width + j] *= factors[(done + b) * layers + layer]
        for i in range(widths[layer]):
            combine(after(sums, begins[layer] + i * width), after(h, i), row, g, width, count, width)
        h, row = after(h, SLICE * row), width


@entry
def run(shape, memory, work, iterations, phases, scope, rate, batch_size):
    """Run the phases (a sum of those of `steps`) of some local iterations; shape is (layers, address of the widths)."""
    layers, widths = shape[0], longs(shape[1])
    m, w, apart = memory, work, scope != NONE
    ends, begins = longs(m.ends), longs(m.tensors)
    for iteration in range(iterations):
        if phases & BEGIN:
            clear(floats(m.sums), begins[layers])
        for first in range(ends[iteration], ends[iteration + 1], SLICE):
            done, count = first - ends[iteration], min(SLICE, ends[iteration + 1] - first)
            if phases & (MEASURE | CLASSIFY):
                forward(m, w, layers, widths, first, count)
            if phases & CLASSIFY:
                score(m, first, count, widths[layers])
            if phases & MEASURE:
                measure(m, w, layers, widths, first, done, count, apart)
            if phases & FACTORS:
                clip(m, done, count, layers, scope)
            if phases & ADD:
                add(m, w, layers, widths, done, count)
        if phases & STEP:
            step(m, layers, rate, batch_size)
